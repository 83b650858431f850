"""The look at a whole fleet: which places answer, what they hold, who reaches whom, and the routes that follow.

All places are asked at once, each with a time-out. Changes nothing anywhere.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftgauge.errors import FleetError, UnfinishedError
from draftgauge.fleet.places import WORKSTATION, Place
from draftgauge.fleet.reach import Reach
from draftgauge.fleet.remote import version_at
from draftgauge.fleet.routes import plan_route, what_hosts_say

ASK_TIMEOUT_S = 30.0


def check_fleet(reach: Reach) -> dict[str, Any]:
    """What every place answers, as data.

    Example of the result: `{"places": {"eval1": {"host": "eval1", "python": "3.11.2", "draftgauge": "0.1.0",
    "space": {"folder": "/srv", "free_bytes": 10**12, "writable": True}, "problem": ""}}, "ways": [{"from": "pve1",
    "to": "eval1", "refusal": "Connection timed out"}], "routes": [{"from": "ct200", "to": "eval1", "text": "ct200
    -> pve1 (container) -> workstation -> eval1, because ..."}]}`.
    """
    places = list(reach.fleet.places.values())
    with ThreadPoolExecutor(max(1, min(32, len(places)))) as pool:
        asked = dict(zip(reach.fleet.places, pool.map(lambda place: _ask(reach, place), places), strict=True))
    answering = [place for place in places if not asked[place.name]["problem"]]
    hosts = [place for place in answering if not place.is_container]
    said = what_hosts_say(reach, hosts)
    ways = [
        {"from": one, "to": other, "refusal": refusal}
        for (one, other), refusal in said.items()
        if one != WORKSTATION
    ]
    return {"places": asked, "ways": ways, "routes": _routes(reach, answering)}


def _ask(reach: Reach, place: Place) -> dict[str, Any]:
    folders = [] if place.work is None else [place.work]
    answer: dict[str, Any] = {"host": None, "python": None, "draftgauge": "", "space": None, "problem": ""}
    try:
        about = reach.call(place, "about", folders=folders, timeout_s=ASK_TIMEOUT_S)
        answer |= {"host": about["host"], "python": about["python"]}
        if place.work is not None:
            answer["space"] = about["space"].get(place.work) or reach.call(place, "space", path=place.work)
        answer["draftgauge"] = version_at(reach, place) if about["python"] else ""
    except (FleetError, UnfinishedError) as exc:
        answer["problem"] = str(exc)
    return answer


def _routes(reach: Reach, answering: list[Place]) -> list[dict[str, str]]:
    """From every container, or host that holds none, to every place with a work folder."""
    holding = {place.host for place in answering if place.is_container}
    sources = [p for p in answering if p.is_container or (p.name not in holding and p.name != WORKSTATION)]
    targets = [p for p in answering if p.work is not None]
    pairs = [(source, target) for source in sources for target in targets if source != target]
    with ThreadPoolExecutor(max(1, min(16, len(pairs)))) as pool:
        routes = list(pool.map(lambda pair: plan_route(reach, *pair), pairs))
    return [{"from": r.source.name, "to": r.target.name, "text": str(r)} for r in routes]
