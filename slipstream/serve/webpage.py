"""The page at /: files of the package as they are, under a policy that lets them load and run nothing else.

Plain HTML, style and modules in `page/`; the charts are drawn by uPlot (MIT), which lies beside them. The page speaks
to the server as any client does. Called by `app`.
"""

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.problems import Problem

_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml", "": "text/plain; charset=utf-8",
}  # fmt: skip
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for each time, and mostly answered 304
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(http: HttpRequest) -> Response:
    return _file(http, "index.html")


@router.get("/page/{name:path}")
async def file(http: HttpRequest, name: str) -> Response:
    return _file(http, name)


def _file(http: HttpRequest, name: str) -> Response:
    content = contents().get(name)
    if content is None:
        raise Problem(404, f"there is no {http.url.path}")
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    if http.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={**HEADERS, "etag": tag})
    kind = _TYPES[name.partition(".")[2]]
    return Response(content, media_type=kind, headers={**HEADERS, "etag": tag})


@cache
def contents() -> dict[str, bytes]:
    """All files by their path below `page/`: what is not among them is not served."""
    return dict(_walk(files("slipstream.serve") / "page", ""))


def _walk(folder: Traversable, above: str) -> list[tuple[str, bytes]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{above}{entry.name}/")
        else:
            found.append((above + entry.name, entry.read_bytes()))
    return found
