from collections.abc import Iterator

import pytest

from penstock.engine.native.runtime import TILE_MODES, native_library


@pytest.fixture
def no_tiles() -> Iterator[None]:
    """Attention without the tiles of AMX, which round differently, where a trial has chosen them."""
    library = native_library()
    assert library is not None
    library.penstock_choose_tiles(TILE_MODES["never"])
    yield
    library.penstock_choose_tiles(TILE_MODES["auto"])
