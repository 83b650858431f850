"""The programs for places without Python are constant text; what they are asked for is checked first.

That they do what they should is seen in test_transports, at every kind of place.
"""

import pytest

from draftgauge.errors import FleetError
from draftgauge.fleet import shell

HOSTILE = "a'; touch pwned; $(x) \"\n"


@pytest.mark.parametrize("verb", ["look", "space", "remove", "publish", "text", "note"])
def test_names_are_arguments_and_never_part_of_a_program(verb: str) -> None:
    request = {"path": HOSTILE, "part": HOSTILE, "text": HOSTILE, "limit": 3}
    words = shell.argv(verb, request)
    assert words[:5] == ("env", "LC_ALL=C", "sh", "-c", shell.PROGRAMS[verb])
    assert "{" not in words[4].replace("${", "").replace("{}", "").replace("{ dd", "").replace("{ ", "")
    assert HOSTILE in words[5:]


def test_a_path_that_looks_like_an_option_is_made_a_path() -> None:
    assert shell.argv("remove", {"part": "-rf"})[-1] == "./-rf"


@pytest.mark.parametrize(
    ("verb", "request_", "said"),
    [
        ("send", {"pieces": [{"path": "a", "offset": 5, "size": 3}]}, "only whole files"),
        ("send", {"pieces": [{"text": "eA=="}]}, "only whole files"),
        ("receive", {"part": ".partial-x", "skip": 0, "outputs": [["a", 1]]}, "needs python3"),
        ("relay", {}, "python3 is needed"),
    ],
)
def test_what_needs_python_says_so(verb: str, request_: dict, said: str) -> None:
    with pytest.raises(FleetError, match=said):
        shell.argv(verb, request_)
