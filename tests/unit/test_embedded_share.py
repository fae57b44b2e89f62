"""An embedded server is started again only for who still holds it."""

from pathlib import Path

import pytest

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.embedded_share import SharedServer


async def test_who_does_not_hold_the_server_cannot_revive_it_and_is_told(tmp_path: Path) -> None:
    shared = SharedServer(tmp_path / ".windlass", found=lambda _: None)

    with pytest.raises(StoreUnavailable, match="closed here; open the app again"):
        await shared.revive()
    assert not (tmp_path / ".windlass").exists()
