"""``qmm.save``: exact, readable by others, and whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import qmm
from qmm.checkpoint.safetensors_read import SafetensorsFile


def codes(bits: int, k: int = 40, n: int = 5) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (k, n), generator=torch.Generator().manual_seed(bits))


def scales(rows: int, n: int = 5, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.rand(rows, n, generator=torch.Generator().manual_seed(rows)).add(0.5).to(dtype)


def every_kind() -> dict[str, qmm.QuantizedWeight]:
    """A weight for each thing a weight can be."""
    make = qmm.QuantizedWeight.from_codes
    found = {f"bits{b}": make(codes(b), scales(3), bits=b, group_size=16) for b in range(1, 9)}
    found["int"] = make(codes(3), scales(3), codes(3, 3), bits=3, group_size=16)
    found["float"] = make(codes(4), scales(3), scales(3, dtype=torch.bfloat16), bits=4, group_size=16)
    found["bias"] = make(codes(4), scales(3), scales(3), bits=4, group_size=16, zero_kind="bias")
    found["act-order"] = make(codes(4), scales(3), bits=4, group_size=16, g_idx=torch.arange(40) % 3)
    found["codebook"] = make(codes(4), scales(3), bits=4, group_size=16, codebook=torch.randn(16))
    found["e4m3"] = make(codes(4), scales(3, dtype=torch.float8_e4m3fn), bits=4, group_size=16)
    found["one-factor"] = make(codes(4), scales(3), bits=4, group_size=16, scale2=torch.tensor([0.5]))
    small = torch.arange(25, dtype=torch.int8).view(5, 5)
    found["two-level"] = make(
        codes(4), small, small.flip(0), bits=4, group_size=8, zero_kind="bias",
        scale2=torch.rand(3, 5), scale2_ratio=2, zero2=torch.rand(2, 5), zero2_ratio=4,
    )  # fmt: skip
    return {f"model.{name}": w for name, w in found.items()}


def assert_same(a: qmm.QuantizedWeight, b: qmm.QuantizedWeight) -> None:
    assert a.spec == b.spec
    mine, others = a.state_dict(), b.state_dict()
    assert list(mine) == list(others)
    for name, t in mine.items():
        assert t.dtype == others[name].dtype
        assert torch.equal(t.reshape(-1).view(torch.uint8), others[name].reshape(-1).view(torch.uint8)), name


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


PLAIN = {
    "norm.weight": torch.ones(3).bfloat16(),
    "embed.weight": torch.randn(2, 7),
    "none": torch.empty(0, 3),
}


@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_own_format_keeps_everything(tmp_path: Path, target: str) -> None:
    weights = every_kind()
    qmm.save(tmp_path / target, weights, config={"note": "mine"}, plain=PLAIN)
    checkpoint = qmm.load(tmp_path / target)
    assert set(checkpoint) == set(weights)
    for name, w in weights.items():
        assert_same(checkpoint[name], w)
        assert checkpoint.facts(name).spec == w.spec
    assert checkpoint.config == {"quant_method": "qmm", "version": 1, "note": "mine"}
    assert set(checkpoint.plain) == set(PLAIN)
    assert all(torch.equal(checkpoint.tensor(name), t) for name, t in PLAIN.items())
    assert leftovers(tmp_path) == []


def test_readable_by_the_library(tmp_path: Path) -> None:
    """Every tensor at a multiple of its element's size, so that it can be viewed in place."""
    library = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    weights = every_kind()
    qmm.save(tmp_path / "w.safetensors", weights, plain=PLAIN)
    file = SafetensorsFile(tmp_path / "w.safetensors")
    for entry in file.entries.values():
        size = torch.empty(0, dtype=entry.torch_dtype).element_size()
        assert entry.start % size == 0
    assert file.metadata["format"] == "pt"
    found = library.load_file(tmp_path / "w.safetensors")
    expected = {
        f"{name}.{key}": t for name, w in weights.items() for key, t in w.state_dict().items()
    } | PLAIN
    assert set(found) == set(expected)
    for name, t in expected.items():
        assert found[name].shape == t.shape and found[name].dtype == t.dtype
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)), name


def gptq_weights() -> dict[str, qmm.QuantizedWeight]:
    make = qmm.QuantizedWeight.from_codes
    return {
        "model.a": make(codes(4, 64, 16), scales(4, 16), codes(4, 4, 16), bits=4, group_size=16),
        "model.b": make(codes(4, 64, 16), scales(4, 16), bits=4, group_size=16, g_idx=torch.arange(64) % 4),
        "model.c": make(codes(8, 64, 16), scales(2, 16), codes(8, 2, 16), bits=8, group_size=32),
        "model.d": make(codes(3, 40, 5), scales(3), codes(3, 3, 5), bits=3, group_size=16),
    }


@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_gptq_v2(tmp_path: Path, target: str) -> None:
    """Weights that differ in bits and groups, too: GPTQModel's ``dynamic`` says so."""
    weights = gptq_weights()
    qmm.save(tmp_path / target, weights, "gptq_v2")
    checkpoint = qmm.load(tmp_path / target)
    config = checkpoint.config
    assert (config["quant_method"], config["checkpoint_format"]) == ("gptq", "gptq_v2")
    assert (config["bits"], config["group_size"], config["desc_act"], config["sym"]) == (4, 16, True, False)
    assert config["dynamic"] == {
        r"+:^model\.c$": {"bits": 8, "group_size": 32},
        r"+:^model\.d$": {"bits": 3, "group_size": 16},
    }
    for name, w in weights.items():
        found = checkpoint[name]
        assert torch.equal(found.dequantize(), w.dequantize()), name
        assert found.spec.act_order == w.spec.act_order
    if target == "folder":
        assert json.loads((tmp_path / "folder" / "config.json").read_text()) == {
            "quantization_config": config
        }


def test_group_of_a_whole_column(tmp_path: Path) -> None:
    """-1 where it is one for layers of different K."""
    make = qmm.QuantizedWeight.from_codes
    weights = {f"k{k}": make(codes(4, k, 8), scales(1, 8), bits=4, group_size=-1) for k in (16, 32)}
    qmm.save(tmp_path / "w.safetensors", weights, "gptq_v2")
    checkpoint = qmm.load(tmp_path / "w.safetensors")
    assert (
        checkpoint.config["group_size"] == -1
        and "dynamic" not in checkpoint.config
        and checkpoint.config["sym"]
    )
    assert [w.group_size for w in checkpoint.values()] == [16, 32]


REFUSED = {
    "codebook": "layer 'model.codebook': codebook: must be absent",
    "bias": "layer 'model.bias': zeros: must be zero points",
    "two-level": "layer 'model.two-level': zeros",
    "one-factor": "layer 'model.one-factor': scale2: must be absent",
    "bits1": "layer 'model.bits1': bits: must be from 2 to 8",
    "float": "layer 'model.float': zeros",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_what_gptq_cannot_hold(tmp_path: Path, kind: str, target: str) -> None:
    """Names the layer, and nothing is written."""
    weights = {**gptq_weights(), f"model.{kind}": every_kind()[f"model.{kind}"]}
    with pytest.raises(qmm.WeightFormatError) as caught:
        qmm.save(tmp_path / target, weights, "gptq_v2")
    assert REFUSED[kind] in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_lossy_only_when_asked(tmp_path: Path) -> None:
    weights = {"model.float": every_kind()["model.float"]}
    with pytest.warns(qmm.FormatWarning):
        qmm.save(tmp_path / "w.safetensors", weights, "gptq_v2", lossy=True)
    assert qmm.load(tmp_path / "w.safetensors")["model.float"].zero_kind is qmm.ZeroKind.INT


@pytest.mark.parametrize("limit", [1, 600, 10**9])
def test_shards(tmp_path: Path, limit: int) -> None:
    """Files of at most so many bytes, a layer never cut, and the index that others expect."""
    weights = every_kind()
    qmm.save(tmp_path / "m", weights, plain=PLAIN, max_shard_bytes=limit)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    if limit == 10**9:
        assert files == ["model.safetensors"]
    else:
        count = len(files)
        assert (
            files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] and count > 2
        )
        index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
        opened = {name: SafetensorsFile(tmp_path / "m" / name) for name in files}
        sizes = {name: sum(e.nbytes for e in f.entries.values()) for name, f in opened.items()}
        assert index["metadata"]["total_size"] == sum(sizes.values())
        for layer in weights:
            assert len({f for t, f in index["weight_map"].items() if t.startswith(layer + ".")}) == 1
        if limit > 1:
            assert max(sizes.values()) <= limit
    checkpoint = qmm.load(tmp_path / "m")
    for name, w in weights.items():
        assert_same(checkpoint[name], w)
    assert set(checkpoint.plain) == set(PLAIN)


def test_one_layer_at_a_time(tmp_path: Path) -> None:
    """A lazy mapping is asked for each weight when its turn comes."""
    alive: list[str] = []

    class Lazy(Mapping[str, qmm.QuantizedWeight]):
        def __getitem__(self, name: str) -> qmm.QuantizedWeight:
            alive.append(name)
            return qmm.quantize(torch.ones(4, 32), group_size=16)

        def __iter__(self) -> Iterator[str]:
            return iter(("a", "b"))

        def __len__(self) -> int:
            return 2

    done: list[list[str]] = []
    qmm.save(tmp_path / "w.safetensors", Lazy(), on_tensor=lambda name: done.append([name, *alive]))
    assert done == [["a", "a"], ["b", "a", "b"]]


def test_nothing_to_write(tmp_path: Path) -> None:
    for target in ("w.safetensors", "folder"):
        qmm.save(tmp_path / target, {})
        assert list(qmm.load(tmp_path / target)) == []


def test_never_over_a_file_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_text("mine")
    weights = {"a": qmm.quantize(torch.ones(4, 32))}
    with pytest.raises(FileExistsError, match=r"w\.safetensors: exists"):
        qmm.save(path, weights)
    assert path.read_text() == "mine"
    qmm.save(path, weights, overwrite=True)
    assert list(qmm.load(path)) == ["a"]
    qmm.save(path, qmm.load(path), overwrite=True)  # over the file that it is read from
    assert_same(qmm.load(path)["a"], weights["a"])
    (tmp_path / "folder").mkdir()
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="a folder never"):
            qmm.save(tmp_path / "folder", weights, overwrite=overwrite)
    assert leftovers(tmp_path) == [] and list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, target: str) -> None:
    path = tmp_path / target
    with pytest.raises(FileExistsError):
        qmm.save(path, {"a": qmm.quantize(torch.ones(4, 32))}, on_tensor=lambda _: path.write_text("mine"))
    assert path.read_text() == "mine"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_an_error_leaves_nothing(tmp_path: Path, target: str) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        qmm.save(tmp_path / target, every_kind(), on_tensor=fail)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, time, torch, qmm
weights = {str(i): qmm.quantize(torch.randn(64, 256)) for i in range(4)}
def wait(name):
    print(name, flush=True)
    time.sleep(60 if name == "2" else 0)
qmm.save(sys.argv[1], weights, on_tensor=wait, overwrite=sys.argv[1].endswith(".safetensors"))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_kill_leaves_the_old_or_nothing(tmp_path: Path, target: str) -> None:
    """kill -9 in the middle: the old file is whole; a new folder is not there. The next writer tidies up."""
    path = tmp_path / target
    if path.suffix:
        path.write_text("old")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == "2":
                break
        assert len(leftovers(tmp_path)) == 1  # it was at work
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert (path.read_text() == "old") if path.suffix else not path.exists()
    assert len(leftovers(tmp_path)) == 1
    qmm.save(tmp_path / f"other-{target}", {"a": qmm.quantize(torch.ones(4, 32))})
    assert len(leftovers(tmp_path)) == 1  # another place: not its business
    qmm.save(path, {"a": qmm.quantize(torch.ones(4, 32))}, overwrite=bool(path.suffix))
    assert list(qmm.load(path)) == ["a"] and leftovers(tmp_path) == []


@pytest.mark.parametrize("target", ["w.safetensors", "folder"])
def test_a_writer_at_work_is_left_alone(tmp_path: Path, target: str) -> None:
    """One that writes to the same place meanwhile, in this process; the one that is done first stays."""
    path, weights = tmp_path / target, {"a": qmm.quantize(torch.ones(4, 32))}

    def second(name: str) -> None:
        qmm.save(path, {"b": weights["a"]})
        assert len(leftovers(tmp_path)) == 1

    with pytest.raises(FileExistsError):
        qmm.save(path, weights, on_tensor=second)
    assert list(qmm.load(path)) == ["b"] and leftovers(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "user's own", "another target's", "unlockable"])
def test_what_is_no_leftover_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name = {"user's own": ".w.safetensors.tmp", "another target's": ".v.safetensors.0123abcd.qmm-tmp"}.get(
        kind, ".w.safetensors.0123abcd.qmm-tmp"
    )
    (tmp_path / "mine").write_text("mine")
    if kind == "link":
        (tmp_path / name).symlink_to("mine")
    else:
        (tmp_path / name).write_text("mine")
    if kind == "unlockable":  # as on a file system without locks

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("fcntl.flock", refuse)
    qmm.save(tmp_path / "w.safetensors", {"a": qmm.quantize(torch.ones(4, 32))})
    assert leftovers(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "gguf"}, "format: must be one of qmm, gptq_v2; got 'gguf'"),
    "suffix": ({"path": "w.gguf"}, r"path: must be a \.safetensors file or a folder"),
    "shards-in-a-file": ({"max_shard_bytes": 5}, "max_shard_bytes: needs a folder"),
    "shard-of-nothing": ({"path": "m", "max_shard_bytes": 0}, "max_shard_bytes: must be at least 1; got 0"),
    "name-twice": ({"plain": {"a.scales": torch.ones(1)}}, "plain: names must not be.*'a.scales'"),
    "config-contradicts": ({"config": {"version": 2}}, "config: version must be 1 for these weights; got 2"),
    "config-bits": ({"format": "gptq_v2", "config": {"bits": 8}}, "config: bits must be 4"),
    "files-of-a-file": ({"files": {"t.json": Path("t")}}, "files: need a folder to stand in"),
    "file-over-config": (
        {"path": "m", "files": {"config.json": Path("t")}},
        "files: names must be .*'config.json'",
    ),
    "file-outside": ({"path": "m", "files": {"../t": Path("t")}}, r"files: names must be plain.*'\.\./t'"),
    "file-anywhere": ({"path": "m", "files": {"/tmp/t": Path("t")}}, "files: names must be plain.*'/tmp/t'"),
    "config-no-json": ({"config": {"f": len}}, "config: must be JSON"),
    "config-nan": ({"config": {"f": float("nan")}}, "config: must be JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(tmp_path: Path, case: str) -> None:
    changes, match = BAD[case]
    arguments = {"path": "w.safetensors", "weights": {"a": qmm.quantize(torch.ones(4, 32))}, **changes}
    with pytest.raises(ValueError, match=match):
        qmm.save(**{**arguments, "path": tmp_path / arguments["path"]})
    assert list(tmp_path.iterdir()) == []


def test_permissions_and_place(tmp_path: Path) -> None:
    """As any new file's (a temporary one is often private), and a folder that does not exist is said."""
    weights = {"a": qmm.quantize(torch.ones(4, 32))}
    qmm.save(tmp_path / "w.safetensors", weights)
    (tmp_path / "other").write_text("")
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(FileNotFoundError):
        qmm.save(tmp_path / "none" / "w.safetensors", weights)
