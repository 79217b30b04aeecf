"""The link's seal: changed, repeated, dropped or reflected messages are refused."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from trainmover.edges.seal import Seal, derive, new_token, read_token, write_token
from trainmover.errors import ConfigError, RemoteProtocolError

KEY = derive("t" * 32, "link", b"nonces")


def ends() -> tuple[Seal, Seal]:
    return (
        Seal(KEY, sends_as="agent", receives_from="controller"),
        Seal(KEY, sends_as="controller", receives_from="agent"),
    )


def test_messages_pass_in_order() -> None:
    agent, controller = ends()
    assert [controller.open(agent.close(text)) for text in (b"a", b"", b"c")] == [b"a", b"", b"c"]


@pytest.mark.parametrize("position", [0, 7, 8, 23, 24])
def test_a_changed_byte_is_refused(position: int) -> None:
    agent, controller = ends()
    data = bytearray(agent.close(b"hello"))
    data[position] ^= 1
    with pytest.raises(RemoteProtocolError):
        controller.open(bytes(data))


def test_a_repeated_message_is_refused() -> None:
    agent, controller = ends()
    data = agent.close(b"hello")
    controller.open(data)
    with pytest.raises(RemoteProtocolError, match="expected message 2"):
        controller.open(data)


def test_a_message_left_out_is_noticed() -> None:
    agent, controller = ends()
    agent.close(b"lost")
    with pytest.raises(RemoteProtocolError, match="expected message 1"):
        controller.open(agent.close(b"hello"))


def test_ones_own_message_reflected_is_refused() -> None:
    agent, _ = ends()
    with pytest.raises(RemoteProtocolError):
        agent.open(agent.close(b"hello"))


def test_keys_of_other_purposes_and_tokens_differ() -> None:
    keys = {
        derive("t" * 32, "link", b"a"),
        derive("t" * 32, "channels", b"a"),
        derive("u" * 32, "link", b"a"),
        derive("t" * 32, "link", b"a", b""),
    }
    assert len(keys) == 4


def test_the_token_file_is_for_its_user_only(tmp_path: Path) -> None:
    token = new_token()
    write_token(tmp_path / "token", token)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert read_token(tmp_path / "token") == token


def test_a_token_is_there_whole_while_others_write_it(tmp_path: Path) -> None:
    """Two agents that share a run directory start at once."""
    path, token = tmp_path / "token", new_token()
    write_token(path, token)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            write_token(path, token)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        assert {read_token(path) for _ in range(2000)} == {token}
    finally:
        is_over.set()
        for writer in writers:
            writer.join(20)
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


def test_a_short_or_missing_token_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_token(tmp_path / "token")
    with pytest.raises(ConfigError, match="can't be read"):
        read_token(tmp_path / "nothing")
