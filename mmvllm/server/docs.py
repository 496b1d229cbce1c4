"""Serves the page `/docs`, which lists the routes. Unlike FastAPI's page, it loads nothing from other hosts."""

from html import escape

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>mmvllm {version}</title>
<h1>mmvllm {version}</h1>
<p>An OpenAI-compatible server. <a href="openapi.json">openapi.json</a> describes all requests and responses; any
OpenAPI viewer opens it. <code>docs/http_api.md</code> of mmvllm has their fields and limits.</p>
<table>
{rows}
</table>
</html>
"""
HEADERS = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'", "X-Content-Type-Options": "nosniff"}


def add_page(app: FastAPI) -> None:
    """Serve the page at `/docs`."""

    @app.get("/docs", include_in_schema=False)
    @app.head("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(
            PAGE.format(version=escape(app.version), rows="\n".join(_rows(app.openapi()))), 200, HEADERS
        )


def _rows(schema: dict) -> list[str]:
    return [
        f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{escape(operation.get('description', ''))}"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]
