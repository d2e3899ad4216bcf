"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields: adapters that come and go while the server runs."""

import logging
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from penstock.api.bodies import CONTEXT, check_model, read_body
from penstock.api.routes import Route

log = logging.getLogger(__name__)


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`lora_path` is a directory below --adapter-dir. With `load_inplace`, it replaces an adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`lora_int_id` has no meaning here: adapters are known by their names."""

    lora_name: str
    lora_int_id: int | None = None


async def load_adapter(http: web.Request) -> web.Response:
    """Reads an adapter and serves it as a model of its name. Nothing of one that does not fit the model is served."""
    context = http.app[CONTEXT]
    body, _, _ = await read_body(http, LoadAdapterRequest)
    check_model(http, body.lora_name)
    root = context.options.adapter_dir
    assert root is not None
    adapter = await context.adapters.load(body.lora_name, Path(body.lora_path), Path(root), replaces=body.load_inplace)
    log.info("adapter %r is loaded from %s", adapter.name, adapter.path)
    return web.Response(text=f"Success: LoRA adapter '{adapter.name}' added successfully.")


async def unload_adapter(http: web.Request) -> web.Response:
    """Serves an adapter no longer. Requests that run with it end with it."""
    context = http.app[CONTEXT]
    body, _, _ = await read_body(http, UnloadAdapterRequest)
    check_model(http, body.lora_name)
    context.adapters.remove(body.lora_name)
    log.info("adapter %r is unloaded", body.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


ADAPTER_ROUTES = (
    Route("POST", "/v1/load_lora_adapter", load_adapter, request=LoadAdapterRequest, media_type="text/plain"),
    Route("POST", "/v1/unload_lora_adapter", unload_adapter, request=UnloadAdapterRequest, media_type="text/plain"),
)
