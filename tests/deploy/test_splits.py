"""Splits: what their settings may say, and which model a request is drawn for."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Config
from penstock.config.several import configs_of
from penstock.config.sources import read_config_file
from penstock.deploy.factory import start_deployment
from penstock.deploy.splits import Split, check_splits, part_of
from penstock.types.errors import ConfigError
from support.tiny_models import TinyLlama, write_gguf

NAMES = ("chat", "chat-b", "chat-c")
TWO = [Split(of="chat", to="chat-b", share=0.2), Split(of="chat", to="chat-c", share=0.3)]
USERS = [f"user-{number}" for number in range(4000)]


def configs(folder: Path, second: str, first: str = "") -> list[Config]:
    """Two entries of one file, of which the second is the first one's part."""
    model = write_gguf(folder / "tiny.gguf", TinyLlama())
    (folder / "penstock.toml").write_text(
        f"kv_cache_memory = '1MiB'\nthreads = 1\nmax_num_seqs = 4\n"
        f"[[models]]\nmodel = '{model}'\nserved_model_name = 'chat'\n{first}\n"
        f"[[models]]\nmodel = '{model}'\nserved_model_name = 'chat-b'\n{second}\n"
    )
    file = read_config_file(folder / "penstock.toml")
    return configs_of(file.values, tables=file.models)


def test_a_file_gives_a_model_a_part_of_the_requests_for_another_one(tmp_path: Path) -> None:
    deployment = start_deployment(
        configs(tmp_path, "reserve = 'chunk'\nsplit_of = 'chat'\nsplit_share = '10%'\nsplit_tenant = ['beta']")
    )
    try:
        assert deployment.splits == (Split(of="chat", to="chat-b", share=0.1, tenants=frozenset(["beta"])),)
        one, two = deployment.served
        assert deployment.part_of("chat", "beta", "anybody") is deployment.part_of(None, "beta", "anybody") is two
        assert {deployment.part_of("chat", "alpha", user) for user in USERS[:100]} == {one, two}
        assert {deployment.part_of("chat-b", "alpha", user) for user in USERS[:100]} == {two}
        assert deployment.part_of("unknown", "beta", "anybody") is None
    finally:
        deployment.close()


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ("split_share = 0.5", "chat-b has split_share or split_tenant, and no split_of"),
        ("split_tenant = ['a']", "chat-b has split_share or split_tenant, and no split_of"),
        ("split_of = 'chat'", "no part of its requests.*split_share"),
        ("split_of = 'unknown'\nsplit_share = 0.5", "'unknown', which is not the name of another model.*chat, chat-b"),
        ("split_of = 'chat-b'\nsplit_share = 0.5", "not the name of another model"),
    ],
)
def test_half_a_split_is_refused_before_anything_is_loaded(tmp_path: Path, settings: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        start_deployment(configs(tmp_path, settings, "load_on = 'request'"))


def test_parts_are_no_more_than_all() -> None:
    check_splits(TWO, NAMES)
    check_splits(
        [Split(of="chat", to=f"chat-{name}", share=share) for name, share in (("b", 0.56), ("c", 0.34), ("d", 0.1))], NAMES
    )
    check_splits([Split(of="chat", to="chat-b", share=0.5), Split(of="chat-b", to="chat", share=0.9)], NAMES)
    with pytest.raises(ConfigError, match="requests for chat add up to 110%"):
        check_splits([*TWO, Split(of="chat", to="chat-d", share=0.6)], NAMES)


def test_each_model_has_its_share_of_the_users() -> None:
    drawn = [part_of(TWO, "chat", "", user) for user in USERS]
    for name, share in (("chat", 0.5), ("chat-b", 0.2), ("chat-c", 0.3)):
        assert abs(drawn.count(name) / len(USERS) - share) < 0.04
    assert drawn == [part_of(TWO, "chat", "other", user) for user in USERS], "the same after a restart, and on other servers"


def test_a_larger_share_keeps_the_users_that_it_had() -> None:
    few, many = ([Split(of="chat", to="chat-b", share=share)] for share in (0.1, 0.4))
    for user in USERS:
        if part_of(few, "chat", "", user) == "chat-b":
            assert part_of(many, "chat", "", user) == "chat-b"


def test_a_tenant_goes_before_the_draw() -> None:
    splits = [Split(of="chat", to="chat-b", share=1.0), Split(of="chat", to="chat-c", tenants=frozenset(["beta"]))]
    assert part_of(splits, "chat", "beta", "user") == "chat-c"
    assert part_of(splits, "chat", "alpha", "user") == "chat-b"
    assert part_of(splits, "chat-c", "alpha", "user") == "chat-c"
