"""Calls to a server over HTTP: tried again where that helps, with a bound, and refusals told in the server's words.

Knows nothing of what is asked. The key is sent and never shown, stored or repeated in a message.
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2
import tenacity

from draftgauge.errors import AnswerError, ConnectionLostError, EngineError

#: The server is there, but not now.
_LATER = {429, 502, 503, 504}
#: The server has no such path, or not for this method.
_ABSENT = {404, 405, 501}
#: What the server says of one request and not of itself.
_OF_THE_REQUEST = {400, 413, 422, 500}
_SHOWN_CHARACTERS = 300
_CONNECT_S = 10.0


@dataclass(frozen=True)
class Patience:
    """How often and how long a call is tried: `wait_s` doubles from try to try up to `longest_s`.

    A server that names the time to wait (Retry-After) is waited for so long, up to `longest_s`. `timeout_s` is how
    long one answer may take.
    """

    attempts: int = 6
    wait_s: float = 0.5
    longest_s: float = 60.0
    timeout_s: float = 600.0

    def pause_s(self, attempt: int, *, after_s: float | None = None) -> float:
        """How long to wait after an attempt, counted from 1, where the server asks for `after_s`.

        Example:
            `Patience(wait_s=0.5).pause_s(3)` is 2.0.
        """
        return min(self.wait_s * 2.0 ** (attempt - 1) if after_s is None else after_s, self.longest_s)


class _NotNowError(Exception):
    """A try that is worth another; `after_s` is what the server asks to wait."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Calls:
    """One server: its address as it may be shown, and calls to it. To be closed, or used in a `with`.

    Raises:
        EngineError: The address is not one of http or https.
    """

    def __init__(self, url: str, *, key: str | None = None, patience: Patience | None = None) -> None:
        try:
            given = httpx2.URL(url)
        except httpx2.InvalidURL as exc:
            raise EngineError(
                f"the address of the engine is not one: {exc}; expected http://HOST:PORT"
            ) from exc
        if given.scheme not in ("http", "https") or not given.host:
            raise EngineError("the address of the engine must begin with http:// or https:// and name a host")
        port = "" if given.port is None else f":{given.port}"
        host = f"[{given.host}]" if ":" in given.host else given.host
        path = given.path.rstrip("/").removesuffix("/v1")
        #: Without user, password and query.
        self.url = f"{given.scheme}://{host}{port}{path}"
        self.patience = patience or Patience()
        self._key = key
        self._client = httpx2.Client(
            auth=(given.username, given.password) if given.username and key is None else None,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(self.patience.timeout_s, connect=_CONNECT_S),
        )

    def __enter__(self) -> Calls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def find(self, path: str) -> Any | None:
        """The JSON at `path`; None where the server has nothing there, or something else than JSON."""
        text = self.text(path)
        try:
            return None if text is None else json.loads(text)
        except json.JSONDecodeError:
            return None

    def text(self, path: str) -> str | None:
        """The text at `path`; None where the server has nothing there.

        Raises:
            EngineError: The server refuses.
            ConnectionLostError: It did not answer, however often it was asked.
        """
        answer = self._asked("GET", path, None)
        if answer.status_code in _ABSENT:
            return None
        self._require(answer, path)
        return answer.text

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers to a JSON body.

        Raises:
            AnswerError: The server refuses this request, or answers no JSON object.
            EngineError: It refuses altogether.
            ConnectionLostError: It did not answer, however often it was asked.
        """
        answer = self._asked("POST", path, body)
        self._require(answer, path)
        try:
            value = answer.json()
        except ValueError as exc:
            raise AnswerError(f"{self.url}{path} answered no JSON: {self._shown(answer.text)}") from exc
        if not isinstance(value, dict):
            raise AnswerError(f"{self.url}{path} answered {type(value).__name__}; expected a JSON object")
        return value

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        """The answer, once the server has one to give."""

        def ask() -> httpx2.Response:
            try:
                answer = self._client.request(method, self.url + path, json=body)
            except httpx2.TransportError as exc:
                raise _NotNowError(self._shown(str(exc) or type(exc).__name__)) from exc
            if answer.status_code in _LATER:
                after = retry_after_s(answer.headers.get("retry-after"))
                raise _NotNowError(f"status {answer.status_code}: {self._said(answer)}", after)
            return answer

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_NotNowError),
            stop=tenacity.stop_after_attempt(self.patience.attempts),
            wait=self._wait_s,
            reraise=True,
        )
        try:
            return retrying(ask)
        except _NotNowError as exc:
            raise ConnectionLostError(
                f"{self.url}{path} did not answer in {self.patience.attempts} tries ({exc}); see to the server, "
                "then give the same command again"
            ) from exc

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        raised = state.outcome.exception() if state.outcome is not None else None
        after_s = raised.after_s if isinstance(raised, _NotNowError) else None
        return self.patience.pause_s(state.attempt_number, after_s=after_s)

    def _require(self, answer: httpx2.Response, path: str) -> None:
        """Raises unless the server agreed."""
        status = answer.status_code
        if answer.is_success:
            return
        hint = {401: "; set DRAFTGAUGE_API_KEY", 403: "; set DRAFTGAUGE_API_KEY"}.get(status, "")
        text = f"{self.url}{path} refused with status {status}: {self._said(answer)}{hint}"
        raise (AnswerError if status in _OF_THE_REQUEST else EngineError)(text)

    def _said(self, answer: httpx2.Response) -> str:
        """The server's own message, in any of the forms that servers of this kind use."""
        try:
            value = answer.json()
        except ValueError:
            return self._shown(answer.text)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        return self._shown(value if isinstance(value, str) else json.dumps(value))

    def _shown(self, text: str) -> str:
        """The text, short, on one line, and without the key."""
        hidden = text if self._key is None else text.replace(self._key, "***")
        line = " ".join(hidden.split())
        return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def retry_after_s(after: str | None) -> float | None:
    """What a Retry-After header asks to wait, in seconds or until a date; None where it asks for nothing.

    Example:
        `retry_after_s("3")` is 3.0.
    """
    if after is None:
        return None
    try:
        return max(float(after), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
