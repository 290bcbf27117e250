"""`python -m unidle.tasks.web.site --port 8000 --latency 0.05`."""

import asyncio
import contextlib

import tyro

from unidle.errors import UsageError
from unidle.tasks.web.site.serve import SiteServerConfig, serve_forever

if __name__ == "__main__":
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve_forever(tyro.cli(SiteServerConfig, prog="python -m unidle.tasks.web.site")))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
