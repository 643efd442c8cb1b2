"""Keys with names and limits of their own: what their file may say, what they open, and that a new file counts at once."""

import asyncio
import hashlib
import signal
import textwrap
from dataclasses import fields, replace

import httpx
import pytest

from penstock.cli.options import setting_keys
from penstock.config import ServerConfig
from penstock.config.components import config_from
from penstock.config.keys import api_keys, isolates_tenants, read_key_file, read_named_keys
from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.policies import admission_limits
from penstock.deploy.resources import MemoryBudget
from penstock.deploy.routes import Route
from penstock.deploy.running import ServedModel
from penstock.obs.metrics import Metrics
from penstock.serve.app import key_ring
from penstock.serve.http.checks import KeyRing
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import Server
from penstock.testing import HashExecutor
from penstock.types.errors import ConfigError
from penstock.types.tenant_limits import TenantLimits
from support.server.errors import check
from support.server.files import put
from support.server.harness import (
    CAPACITY,
    GatedExecutor,
    make_client,
    make_runtime,
    make_text_runtime,
    running,
    until,
    wait_until,
)
from support.server.waits import set_waits

COMPLETIONS = "/v1/completions"
ASK = {"prompt": "a", "max_tokens": 2}
SHA = hashlib.sha256(b"bobs-secret").hexdigest()
FILE = f"""
[[keys]]
name = "alice"
key = "alices-secret"

[[keys]]
name = "bob"
sha256 = "{SHA}"
"""


def bearer(name):
    return {"Authorization": f"Bearer {name}s-secret"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def config(path, **fields):
    return ServerConfig(port=0, api_keys_file=str(path), shutdown_timeout_s=0.0, **fields)


def write(path, **settings):
    """A file in which alice has these settings."""
    lines = [f"{name} = {value}" for name, value in settings.items()]
    path.write_text("\n".join(['[[keys]]\nname = "alice"\nkey = "alices-secret"', *lines]))
    return path


async def test_a_key_and_the_digest_of_one_open_the_server(runtime, file):
    async with make_client(runtime, api_keys_file=str(file), api_keys=("spare",)) as client:
        for name in ("alice", "bob"):
            assert (await client.post(COMPLETIONS, json=ASK, headers=bearer(name))).status_code == 200
        assert (await client.post(COMPLETIONS, json=ASK, headers={"Authorization": "Bearer spare"})).status_code == 200
        for wrong in (SHA, "alice", "alices-secre", "alices-secret2"):
            refused = await client.post(COMPLETIONS, json=ASK, headers={"Authorization": f"Bearer {wrong}"})
            check(refused, 401, "invalid_api_key")


def test_every_key_is_compared_whichever_was_sent(file, monkeypatch):
    from penstock.serve.http import checks

    compared = []
    ring = KeyRing(read_named_keys(file))
    monkeypatch.setattr(checks.hmac, "compare_digest", lambda known, sent: compared.append(known) or known == sent)
    assert ring.find(b"alices-secret").name == "alice"
    assert ring.find(b"nobody") is None
    assert len(compared) == 4
    assert all(len(one) == 32 for one in compared)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "contains no key"),
        ("keys = []", "contains no key"),
        ("keys = 1", "contains no key"),
        ("[[keys]", "is not TOML"),
        ("other = 1\n" + FILE, "something else"),
        ('[[keys]]\nname = "a"', "one of key and sha256"),
        (f'[[keys]]\nname = "a"\nkey = "hidden"\nsha256 = "{SHA}"', "one of key and sha256"),
        ('[[keys]]\nname = "a"\nsha256 = "hidden"', "one of key and sha256"),
        ('[[keys]]\nname = "a"\nkey = ""', "is empty"),
        ('[[keys]]\nname = "a"\nkey = " hidden"', "white space"),
        ('[[keys]]\nkey = "hidden"', "no name"),
        ('[[keys]]\nname = "a b"\nkey = "hidden"', "no name"),
        ('[[keys]]\nname = "key-a"\nkey = "hidden"', "no name"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\nrate = 3', "unknown field 'rate'"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\nmax_concurrent = 0', "max_concurrent is not a count"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\ntokens_per_minute = true', "tokens_per_minute is not a count"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\npriority = 1.5', "priority is not an integer"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\nmodels = []', "not a list of names"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\n[[keys]]\nname = "a"\nkey = "other"', "two keys with the name a"),
        ('[[keys]]\nname = "a"\nkey = "hidden"\n[[keys]]\nname = "b"\nkey = "hidden"', "one key twice"),
        ("#" * (1 << 20) + "\n", "larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_without_its_keys(tmp_path, text, cause):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=cause) as error:
        read_named_keys(path)
    assert "hidden" not in str(error.value)


def test_a_table_is_not_taken_for_keys_one_per_line(file):
    with pytest.raises(ConfigError, match="--api-keys-file"):
        read_key_file(file)


def test_a_key_is_not_given_twice(file):
    with pytest.raises(ConfigError, match="The key of alice is also given"):
        api_keys(config(file, api_keys=("alices-secret",)))


def test_tenants_of_a_file_share_no_prefixes(file, tmp_path):
    assert isolates_tenants(config(write(file)), None)
    (tmp_path / "keys").write_text("one\n")  # a second key may be added while the server runs
    assert isolates_tenants(ServerConfig(api_key_file=str(tmp_path / "keys")), None)
    assert not isolates_tenants(config(file), "all")


async def refusals(client, number, body=ASK, headers=None):
    """The answers to calls one after another."""
    return [await client.post(COMPLETIONS, json=body, headers=headers or bearer("alice")) for _ in range(number)]


async def test_requests_per_minute_are_those_of_the_key(runtime, file):
    write(file, requests_per_minute=2)
    file.write_text(file.read_text() + FILE[FILE.rindex("\n[[keys]]") :])
    async with make_client(runtime, api_keys_file=str(file)) as client:
        *good, refused = await refusals(client, 3)
        assert [answer.status_code for answer in good] == [200, 200]
        check(refused, 429, "overloaded")
        assert "tenant_requests" in refused.text
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert [answer.status_code for answer in await refusals(client, 3, headers=bearer("bob"))] == [200] * 3


async def test_tokens_per_minute_are_those_of_the_key(runtime, file):
    write(file, tokens_per_minute=40)
    async with make_client(runtime, api_keys_file=str(file)) as client:
        answers = await refusals(client, 3, {"prompt": [5] * 20, "max_tokens": 10, "ignore_eos": True})
        assert answers[0].status_code == 200
        check(answers[2], 429, "overloaded")
        assert "tenant_tokens" in answers[2].text


async def test_concurrency_is_that_of_the_key_also_where_a_gateway_names_tenants(file):
    gate = GatedExecutor()
    with running(gate, config=config(write(file, max_concurrent=1), trust_tenant_header=True)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            ask = asyncio.create_task(client.post(COMPLETIONS, json=ASK, headers=bearer("alice") | {"X-Tenant": "one"}))
            await until(lambda: server.runtime.engine.load().num_running == 1)
            refused = await client.post(COMPLETIONS, json=ASK, headers=bearer("alice") | {"X-Tenant": "Acme Corp"})
            check(refused, 429, "overloaded")
            assert "tenant_concurrency" in refused.text
            gate.open()
            assert (await ask).status_code == 200


@pytest.mark.parametrize("limit", [field.name for field in fields(TenantLimits)])
async def test_every_limit_of_a_key_is_kept(limit, file):
    """Also the limits that somebody adds."""
    gate = GatedExecutor()
    with running(gate, config=config(write(file, **{limit: 1}))) as server:
        await second_is_refused(server, gate, bearer("alice"))


@pytest.mark.parametrize("key", [key for key in setting_keys("admission") if key.startswith("tenant_")])
async def test_every_limit_of_all_tenants_is_kept(key):
    limits, gate = admission_limits(config_from({key: 1}).admission), GatedExecutor()
    with running(gate, limits=limits) as server:
        await second_is_refused(server, gate, {"X-Tenant": "alice"})


async def second_is_refused(server, gate, headers):
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=20) as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json=ASK))
        await until(lambda: server.runtime.engine.load().num_running == 1)
        refused = await client.post(COMPLETIONS, json=ASK)
        check(refused, 429, "overloaded")
        assert "tenant_" in refused.text
        gate.open()
        assert (await first).status_code == 200


async def test_a_key_opens_the_models_that_it_names(file):
    smaller = HashExecutor(replace(CAPACITY, num_blocks=CAPACITY.num_blocks - 1))
    toy, other = make_runtime(), make_runtime(smaller, served_names=("other",), aliases=("second",))
    try:
        write(file, models='["second"]')
        async with make_client(toy, other, api_keys_file=str(file)) as client:
            for name, status in (("other", 200), ("second", 200), ("toy", 404), (None, 404), ("none", 404)):
                answer = await client.post(COMPLETIONS, json=ASK | {"model": name}, headers=bearer("alice"))
                assert answer.status_code == status, name
                if status == 404:
                    check(answer, 404, "model_not_found", "model")
                    assert "Served: 'other'" in answer.text
                    assert ("may not use the default model" if name is None else repr(name)) in answer.text
                    assert name == "toy" or "toy" not in answer.text
            listed = (await client.get("/v1/models", headers=bearer("alice"))).json()
            assert [card["id"] for card in listed["data"]] == ["other"]
            load = (await client.get("/load", headers=bearer("alice"))).json()
            assert [line["name"] for line in load["models"]] == ["other"]
            assert load["kv_blocks"] == smaller.capacity.num_blocks - 1
            for method, path, body in (
                ("GET", "/v1/models/toy", None),
                ("GET", "/kv?model=toy", None),
                ("GET", "/kv", None),
                ("GET", "/load?model=toy", None),
                ("POST", "/tokenize", {"model": "toy", "prompt": "a"}),
                ("POST", "/detokenize", {"model": "toy", "tokens": [5]}),
                ("POST", "/v1/embeddings", {"model": "toy", "input": "a"}),
                ("POST", "/tokenize", {"inputs": "a"}),
                ("GET", "/info", None),
            ):
                assert (await client.request(method, path, json=body, headers=bearer("alice"))).status_code == 404, path
    finally:
        toy.close()
        other.close()


async def test_an_encoders_route_tells_a_key_of_no_model_that_it_may_not_use(file):
    toy, hidden = make_runtime(served_names=("toy",)), make_text_runtime(served_names=("hidden",), aliases=())
    write(file, models='["toy", "open"]')
    file.write_text(file.read_text() + FILE[FILE.rindex("\n[[keys]]") :])
    routes = [Route(name="secret", models=("hidden",)), Route(name="open", models=("hidden",))]
    try:
        async with make_client(toy, hidden, routes=routes, api_keys_file=str(file)) as client:
            for key, name, status, cause in (
                ("alice", "toy", 400, "Or serve an encoder"),
                ("bob", "toy", 400, "Or set 'model' to 'hidden'"),
                ("alice", "secret", 404, "Served: 'toy', 'open'."),
                ("alice", "open", 400, "open writes text"),
                ("bob", "secret", 400, "secret writes text"),
            ):
                answer = await client.post("/v1/embeddings", json={"model": name, "input": "a"}, headers=bearer(key))
                assert (answer.status_code, cause in answer.text) == (status, True), answer.text
    finally:
        toy.close()
        hidden.close()


@pytest.mark.parametrize(("asked", "expected"), [(None, 3), (-5, 3), (0, 3), (3, 3), (7, 7)])
async def test_requests_are_no_more_urgent_than_their_key(file, asked, expected):
    seen = []
    runtime = make_runtime(is_priority_scheduled=True)
    decide = runtime.admission.decide
    runtime.admission.decide = lambda ask, *rest, **options: seen.append(ask.priority) or decide(ask, *rest, **options)
    try:
        async with make_client(runtime, api_keys_file=str(write(file, priority=3))) as client:
            body = ASK if asked is None else ASK | {"priority": asked}
            assert (await client.post(COMPLETIONS, json=body, headers=bearer("alice"))).status_code == 200
    finally:
        runtime.close()
    assert seen == [expected]


def status(server, name):
    return httpx.post(server.url + COMPLETIONS, json=ASK, headers=bearer(name), timeout=20).status_code


def test_a_new_file_counts_at_once_and_a_bad_one_not_at_all(file, monkeypatch, caplog):
    set_waits(monkeypatch, watch_every_s=0.02)
    with running(config=config(write(file))) as server:
        assert (status(server, "alice"), status(server, "bob")) == (200, 401)
        put(file, FILE)
        wait_until(lambda: status(server, "bob") == 200)
        put(file, "[[keys]]\n")
        wait_until(lambda: "stays in force" in caplog.text)
        assert (status(server, "alice"), status(server, "bob")) == (200, 200)
        put(file, FILE[FILE.rindex("\n[[keys]]") :])
        wait_until(lambda: status(server, "alice") == 401)
        assert status(server, "bob") == 200
        file.unlink()
        wait_until(lambda: caplog.text.count("stays in force") == 2)
        assert status(server, "bob") == 200
    assert "secret" not in caplog.text


def test_a_file_that_is_replaced_during_the_start_counts(file, monkeypatch):
    def read_and_replace(config):
        keys = key_ring(config)
        put(file, FILE)
        return keys

    set_waits(monkeypatch, watch_every_s=0.02)
    monkeypatch.setattr("penstock.serve.server.key_ring", read_and_replace)
    with running(config=config(write(file))) as server:
        wait_until(lambda: status(server, "bob") == 200)


def test_a_new_file_without_a_key_whose_requests_must_stay_here_is_not_used(file, monkeypatch, caplog):
    set_waits(monkeypatch, watch_every_s=0.02)
    stays_here = UpstreamConfig(name="far", url="http://localhost:1/v1", model="m", never_keys=("alice",))
    more = {"upstreams": [stays_here], "routes": [Route(name="auto", models=("far", "toy"))]}
    with running(config=config(write(file)), more=more) as server:
        put(file, file.read_text().replace('name = "alice"', 'name = "alice-2"'))
        wait_until(lambda: "stays in force" in caplog.text)
        assert "names the API key 'alice', which the server does not have" in caplog.text
        assert status(server, "alice") == 200


def test_a_key_whose_requests_must_stay_here_can_be_revoked(file, monkeypatch, caplog):
    set_waits(monkeypatch, watch_every_s=0.02)
    stays_here = UpstreamConfig(name="far", url="http://localhost:1/v1", model="m", never_keys=("alice",))
    more = {"upstreams": [stays_here], "routes": [Route(name="auto", models=("far", "toy"))]}
    put(file, FILE)
    with running(config=config(file), more=more) as server:
        assert status(server, "alice") == 200
        only_bob = FILE[FILE.rindex("\n[[keys]]") :]
        put(file, only_bob)
        wait_until(lambda: status(server, "alice") == 401)
        assert "never_keys of the upstream far names the API key 'alice'" in caplog.text
        put(file, only_bob + '[[keys]]\nname = "carol"\nkey = "carols-secret"\n')
        wait_until(lambda: status(server, "carol") == 200)


def test_a_hangup_reads_keys_and_limits_again(file, monkeypatch):
    set_waits(monkeypatch, watch_every_s=3600.0)
    with running(config=config(write(file))) as server:
        assert status(server, "alice") == 200
        write(file, requests_per_minute=1)
        server.server._has_terminal = False
        server.server.handle_signal(signal.SIGHUP, None)
        wait_until(lambda: status(server, "alice") == 429)


def test_metrics_and_the_log_tell_names_and_only_those(file, caplog):
    caplog.set_level("INFO")
    write(file, requests_per_minute=1)
    with running(config=config(file, log_requests=1.0)) as server:
        assert [status(server, "alice") for _ in range(2)] == [200, 429]
        shown = httpx.get(server.url + "/metrics", headers=bearer("alice")).text
    for line in (
        'penstock_tenant_requests_total{model="toy",outcome="ended",tenant="alice"} 1.0',
        'penstock_tenant_requests_total{model="toy",outcome="rejected",tenant="alice"} 1.0',
        'penstock_tenant_tokens_total{kind="generation",model="toy",tenant="alice"} 2.0',
    ):
        assert line in shown
    assert [record.fields.get("key") for record in caplog.records if hasattr(record, "fields")] == ["alice"] * 2
    assert "secret" not in caplog.text + shown


async def test_metrics_count_by_the_key_whatever_tenant_its_client_names(runtime, file):
    """A tenant's name may be another key's: alice's gateway has a user bob."""
    runtime.metrics.tenants = frozenset({"alice", "bob"})
    async with make_client(runtime, api_keys_file=str(file), trust_tenant_header=True) as client:
        for tenant in ("bob", "user7"):
            headers = bearer("alice") | {"X-Tenant": tenant}
            assert (await client.post(COMPLETIONS, json=ASK, headers=headers)).status_code == 200
        runtime.engine.drain()
        headers = bearer("alice") | {"X-Tenant": "bob"}
        assert (await client.post(COMPLETIONS, json=ASK, headers=headers)).status_code == 503
    metrics = runtime.metrics
    with metrics.lock:
        metrics.settle()
    assert metrics.tenant_requests == {("alice", "ended"): 2, ("alice", "rejected"): 1}
    assert metrics.tenant_tokens == {("alice", "prompt"): 2, ("alice", "generation"): 4}


def test_a_priority_that_nobody_looks_at_is_told(file, caplog):
    with running(config=config(write(file, priority=1))):
        pass
    assert "have no effect on the loaded models without --policy priority" in caplog.text


def test_a_name_that_no_model_has_is_told(file, caplog):
    write(file, models=["org/toy", "hash-large"])
    with running(config=config(file)):
        pass
    told = [record.getMessage() for record in caplog.records if "no model has that name" in record.getMessage()]
    assert told == ["the API key alice may use 'hash-large', but no model has that name yet"]


def test_models_that_are_not_loaded_may_look_at_priorities(file, caplog):
    deployment = Deployment([ServedModel(names=("a",), metrics=Metrics("a"), load=int, plan=int)], MemoryBudget())
    with bind_socket("127.0.0.1", 0) as listener:
        Server(deployment, config(write(file, priority=1)), listener, announce=print)._apply_key_names()
    assert "--policy priority" not in caplog.text


def test_the_page_s_file_is_read(tmp_path):
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "how-to" / "deploy.md").read_text()
    path = tmp_path / "keys.toml"
    path.write_text(textwrap.dedent(page.split("```toml\n")[1].split("```")[0]))
    assert [key.name for key in read_named_keys(path)] == ["alice", "batch"]
