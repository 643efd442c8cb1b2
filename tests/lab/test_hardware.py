"""The table of machines is sound, and a user's is read with its mistakes named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.lab.hardware import Hardware, find, known_hardware, read_table
from penstock.types.errors import ConfigError

HEADER = (
    "name,kind,description,memory_gb,read_gb_s,int8_tops,bf16_tops,read_share,compute_share,step_us,basis,"
    "price_per_hour_usd,price_source,price_date,spec_source"
)
ROW = "box,cpu,mine,64,100,4,2,0.8,0.5,100,measured,,,,"


def test_each_machine_has_its_sources_and_a_price_its_date() -> None:
    table = known_hardware()
    assert {"c7i.4xlarge", "c7a.4xlarge", "L4", "L40S", "A10G", "A100", "H100", "H200", "B200", "MI300X"} <= table.keys()
    assert {name for name, one in table.items() if "LLMServingSim" in one.tables} == {"RTX4090", "RTXPRO6000"}
    for hardware in table.values():
        assert hardware.spec_source.startswith("https://"), hardware.name
        assert hardware.basis.startswith(("measured", "assumed")), hardware.name
        assert hardware.price_per_hour is None or (hardware.price_date and hardware.price_source.startswith("https://"))


def test_published_figures() -> None:
    h100 = find("h100", known_hardware())
    assert (h100.memory_bytes, h100.read_bytes_per_s, h100.ops_per_s(is_quantised=True)) == (80e9, 3350e9, 989e12)
    intel = find("c7i.4xlarge", known_hardware())
    assert intel.read_bytes_per_s == pytest.approx(16 * 4800e6 * 8 * 16 / 192)
    assert intel.ops_per_s(is_quantised=True) == pytest.approx(8 * 256 * 3.2e9, rel=0.01)
    assert intel.ops_per_s(is_quantised=False) == intel.bf16_ops_per_s


def test_a_table_of_ones_own_needs_no_column_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"# my machines\n\n{HEADER}\n{ROW}\n")
    box = read_table(path)["box"]
    assert (box.memory_bytes, box.read_bytes_per_s, box.price_per_hour, box.step_ns) == (64_000_000_000, 100e9, None, 100_000)


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (ROW.replace("cpu", "tpu"), "line 2: kind is 'tpu'"),
        (ROW.replace("64,100", "much,100"), "line 2: memory_gb is 'much', which is not a number"),
        (ROW.replace("64,100", "64,0"), "line 2: read_bytes_per_s is 0, and must be more than 0"),
        (ROW.replace("64,100", "1e400,100"), "line 2: memory_gb is '1e400', which is not a number"),
        (ROW.replace("0.8", "1.8"), "line 2: read_share is 1.8"),
        (ROW.replace("64,100", "nan,100"), "line 2: "),
        (ROW + ",more", "line 2: there are 16 values for 15 columns"),
        (f"{ROW}\n{ROW}", "line 3: the name 'box' is taken already"),
        (f"{ROW}\n{ROW.replace('box', 'Box')}", "line 3: the name 'Box' is taken already"),
        (ROW.replace("box", "this"), "line 2: the name 'this' is taken already"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, row: str, cause: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"), [("", "there is no hardware in it"), ("name,kind\n", "the header lacks description, memory_gb")]
)
def test_a_table_without_machines_is_an_error(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=cause):
        read_table(path)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "missing"):
        with pytest.raises(ConfigError, match="can't be read as a table"):
            read_table(tmp_path / name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"Valid: this, c7i\.4xlarge"):
        find("H300", known_hardware())


def test_impossible_hardware_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_bytes"):
        Hardware(
            name="x",
            description="",
            is_gpu=False,
            memory_bytes=0,
            read_bytes_per_s=1,
            int8_ops_per_s=1,
            bf16_ops_per_s=1,
            read_share=1,
            compute_share=1,
            step_ns=0,
            basis="",
        )


def test_prices_of_serverless_workers_say_so() -> None:
    for name in ("A100", "H100", "H200", "B200", "L40S", "RTX4090"):
        assert "RunPod serverless" in find(name, known_hardware()).price_source
