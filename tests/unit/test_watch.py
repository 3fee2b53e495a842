"""Who is named as gone: two ranks of one process, with a dictionary for a store and quick hearts."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from megatron_grpo.config import ConfigError
from megatron_grpo.parallel import watch
from megatron_grpo.parallel.watch import LostPeerError, Watch

HOST = socket.gethostname()
LINK = "Connection closed by peer [10.42.0.2]:40000"


class Store:
    """What two ranks share. While ``gone`` it is a store whose process has ended."""

    def __init__(self) -> None:
        self.values = {f"{what}/{rank}": "" for what in ("host", "beat") for rank in (0, 1)}
        self.gone = False

    def set(self, key: str, value: str, /) -> None:
        self._answer()
        self.values[key] = value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self._answer()
        return [self.values[key].encode() for key in keys]

    def _answer(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    monkeypatch.setattr(watch, "PATIENCE_S", 0.3)
    made = Store()
    made.values |= {"host/0": HOST, "host/1": "far"}  # as all do before anyone reads them
    return made


def eventually(said: Callable[[], str | None]) -> str | None:
    for _ in range(200):
        if said() is not None:
            return said()
        time.sleep(0.02)
    return None


def test_a_rank_that_falls_silent_is_named_and_a_living_one_is_not(store: Store) -> None:
    with Watch(store, 0, 2, silence_s=60.0) as mine:
        with Watch(store, 1, 2, silence_s=60.0):
            time.sleep(0.6)
            assert mine.missing(0.5) is None
        assert eventually(lambda: mine.missing(0.3)) == "rank 1 on host far does not answer"
        assert mine.missing(60.0) is None


def test_without_the_store_rank_0_is_the_one_that_is_gone(store: Store) -> None:
    with Watch(store, 0, 2, silence_s=60.0), Watch(store, 1, 2, silence_s=60.0) as other:
        time.sleep(0.1)
        store.gone = True
        assert eventually(lambda: other.missing(0.3)) == f"rank 0 on host {HOST} does not answer"


def test_a_link_that_a_dead_rank_closed_is_explained(store: Store) -> None:
    named = pytest.raises(LostPeerError, match=r"^rank 1 on host far does not answer$")
    with named as caught, Watch(store, 0, 2, silence_s=60.0):
        raise RuntimeError(LINK)
    assert str(caught.value.__cause__) == LINK


def test_an_error_of_a_link_that_nobody_left_stays_what_it_is(store: Store) -> None:
    with ExitStack() as stack:
        mine = stack.enter_context(Watch(store, 1, 2, silence_s=60.0))
        with pytest.raises(RuntimeError, match="closed by peer"), Watch(store, 0, 2, silence_s=60.0):
            raise RuntimeError(LINK)
        assert eventually(lambda: mine.missing(60.0)) == f"rank 0 on host {HOST} failed: RuntimeError: {LINK}"


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no"), "failed: ValueError: no"), (ConfigError("key=1: is bad"), "refused: key=1: is bad")],
)
def test_a_failure_is_told_to_the_others_and_so_is_a_config_error(store: Store, error: Exception, said: str) -> None:
    with pytest.raises(type(error)), Watch(store, 0, 2, silence_s=60.0):
        raise error
    assert store.values["beat/0"] == said


def test_a_config_error_of_another_host_is_a_config_error_here(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its sentence came before the link was lost or after."""
    codes: list[int] = []
    monkeypatch.setattr(watch, "GRACE_S", 0.1)
    monkeypatch.setattr(watch.os, "_exit", codes.append)
    with Watch(store, 0, 2, silence_s=60.0) as mine:
        with pytest.raises(ConfigError), Watch(store, 1, 2, silence_s=60.0):
            raise ConfigError("key=1: is bad")
        assert eventually(mine.refusal) == "rank 1 on host far: key=1: is bad"
        assert mine.missing(60.0) is None
        assert eventually(lambda: str(codes) if codes else None) is not None and set(codes) == {2}
    assert "rank 0 stops: rank 1 on host far: key=1: is bad\n" in capsys.readouterr().err
    refused = pytest.raises(ConfigError, match=rf"^rank 1 on host {HOST}: key=1: is bad$")
    with refused, Watch(store, 0, 2, silence_s=60.0):
        raise RuntimeError(LINK)
