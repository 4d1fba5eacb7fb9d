"""Who runs a call: precedence, strictness, reasons as data, and backends from outside."""

from __future__ import annotations

import contextvars
import importlib.metadata
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import qmm
from qmm import Backend, Kernel, Limits, Reason, SlowKernelWarning, Tier, UnsupportedError, dispatch, registry
from qmm.call import make_call


class Fake(Backend):
    """Fills the result with one number; refuses what its limits refuse."""

    kernels = (Kernel("one", "fills", Tier.TEXTBOOK), Kernel("two", "fills", Tier.TEXTBOOK, Limits(max_m=1)))

    def __init__(
        self, name: str, *, missing: str = "", emulated: str | None = None, tier: Tier = Tier.TEXTBOOK
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.kernels = tuple(Kernel(k.name, k.summary, tier, k.limits) for k in type(self).kernels)  # type: ignore[misc]
        self._missing, self._emulated = missing, emulated
        self.ran: list[str] = []

    @property
    def emulated(self) -> str | None:
        return self._emulated

    def environment(self) -> list[Reason]:
        return [Reason("its package", self._missing, "install it")] if self._missing else []

    def run(self, call, kernel, config, a, w, bias, out) -> None:  # type: ignore[no-untyped-def]
        self.ran.append(kernel.name)
        out.fill_(len(self.name))


Install = Callable[..., dict[str, Backend]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put these backends, and torch, in place of all others."""

    def put(*fakes: Fake, torch_too: bool = True) -> dict[str, Backend]:
        table: dict[str, Backend] = {f.name: f for f in fakes}
        if torch_too:
            table["torch"] = qmm.backends()["torch"]
        monkeypatch.setattr(registry, "_found", table)
        return table

    return put


@pytest.fixture
def operands() -> tuple[torch.Tensor, qmm.QuantizedWeight]:
    return torch.ones(3, 64), qmm.quantize(torch.ones(8, 64), group_size=32)


def chosen(a: torch.Tensor, w: qmm.QuantizedWeight, **options: Any) -> str:
    """The backend that explain names and that then runs."""
    told = qmm.explain(a, w, **options)
    result = qmm.matmul(a, w, **options)
    assert told.backend is not None
    if told.backend != "torch":
        assert bool((result == len(told.backend)).all())
    return told.backend


# precedence


def test_argument_then_block_then_environment_then_auto(
    install: Install, operands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Fake("x"), Fake("yy"), Fake("zzz"))
    assert chosen(*operands) == "torch"  # of a better tier
    monkeypatch.setenv("QMM_BACKEND", "x")
    assert chosen(*operands) == "x"
    with qmm.use_backend("yy"):
        assert chosen(*operands) == "yy"
        assert chosen(*operands, backend="zzz") == "zzz"
        with qmm.use_backend("auto"):  # lifts the outer block and the environment
            assert chosen(*operands) == "torch"
        assert chosen(*operands) == "yy"
    assert chosen(*operands) == "x"
    monkeypatch.setenv("QMM_BACKEND", "auto")
    assert chosen(*operands) == "torch"
    monkeypatch.setenv("QMM_BACKEND", "")
    assert chosen(*operands) == "torch"


def test_where_the_name_came_from_is_told(
    install: Install, operands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Fake("x"))
    assert qmm.explain(*operands, backend="x").why == "backend= names 'x'"
    monkeypatch.setenv("QMM_BACKEND", "x")
    assert qmm.explain(*operands).why == "QMM_BACKEND names 'x'"
    with qmm.use_backend("torch"):
        assert qmm.explain(*operands).why == "qmm.use_backend names 'torch'"


def test_use_backend_is_undone_by_an_error(install: Install, operands: Any) -> None:
    install(Fake("x"))
    with pytest.raises(RuntimeError, match="inside"), qmm.use_backend("x"):
        raise RuntimeError("inside")
    assert chosen(*operands) == "torch"


def test_use_backend_is_of_this_thread_and_task(install: Install, operands: Any) -> None:
    install(Fake("x"))
    with qmm.use_backend("x"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen, *operands).result() == "torch"
        assert contextvars.copy_context().run(chosen, *operands) == "x"


# strictness and reasons


@pytest.mark.parametrize("way", ["argument", "block", "environment"])
def test_a_named_backend_runs_or_raises(
    install: Install, operands: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    broken = Fake("x", missing="nothing")
    install(broken)

    def call() -> None:
        if way == "argument":
            qmm.matmul(*operands, backend="x")
        elif way == "block":
            with qmm.use_backend("x"):
                qmm.matmul(*operands)
        else:
            monkeypatch.setenv("QMM_BACKEND", "x")
            qmm.matmul(*operands)

    with pytest.raises(UnsupportedError) as caught:
        call()
    error = caught.value
    assert isinstance(error, NotImplementedError) and error.backend == "x" and not broken.ran
    assert error.reasons["x"][0] == Reason("its package", "nothing", "install it")
    assert error.reasons["torch"] == []
    assert "torch: could run it" in str(
        error
    ) and "x: needs its package; got nothing (fix: install it)" in str(error)


def test_auto_passes_over_and_says_so(install: Install, operands: Any) -> None:
    install(Fake("x", missing="nothing", tier=Tier.SPECIALISED))
    told = qmm.explain(*operands)
    assert told.backend == "torch" and "passed over: x.one (its package)" in told.why


def test_auto_raises_with_all_reasons(install: Install, operands: Any) -> None:
    install(Fake("x", missing="a"), Fake("yy", missing="b"), torch_too=False)
    with pytest.raises(UnsupportedError) as caught:
        qmm.matmul(*operands)
    assert set(caught.value.reasons) == {"x", "yy"} and all(caught.value.reasons.values())
    assert caught.value.backend == "auto" and str(caught.value).startswith("no backend can run this call:")


def test_error_survives_pickling(install: Install, operands: Any) -> None:
    import pickle

    install(Fake("x", missing="a"))
    with pytest.raises(UnsupportedError) as caught:
        qmm.matmul(*operands, backend="x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.reasons == caught.value.reasons and again.backend == "x"


def test_a_named_kernel(install: Install, operands: Any) -> None:
    a, w = operands
    fake = Fake("x")
    install(fake)
    qmm.matmul(a[:1], w, backend="x", kernel="two")
    qmm.matmul(a[:1], w, kernel="x.two")
    assert fake.ran == ["two", "two"]
    with pytest.raises(UnsupportedError, match="with kernel 'two'") as caught:
        qmm.matmul(a, w, backend="x", kernel="two")
    assert caught.value.reasons["x"] == [Reason("M <= 1", "3", "", "two")]


def test_tiers_then_table_order(install: Install, operands: Any) -> None:
    install(
        Fake("late", tier=Tier.PORTABLE),
        Fake("later", tier=Tier.PORTABLE),
        Fake("first", tier=Tier.SPECIALISED),
    )
    assert [b.name for b, _ in dispatch.auto_order()][:3] == ["first", "first", "late"]
    assert chosen(*operands) == "first"


def test_auto_never_picks_an_emulated_kernel(install: Install, operands: Any) -> None:
    install(Fake("slow", emulated="interpreter", tier=Tier.SPECIALISED))
    assert chosen(*operands) == "torch"
    told = qmm.explain(*operands)
    assert any(
        "never picks an emulated" in r.limit and r.got == "the interpreter" for r in told.reasons["slow"]
    )
    assert chosen(*operands, backend="slow") == "slow"
    install(Fake("slow", emulated="interpreter"), torch_too=False)
    a, w = operands
    with pytest.raises(UnsupportedError) as caught:
        qmm.matmul(a, w.clone())  # w remembers its plan, and tables do not change in a real process
    assert caught.value.reasons["slow"][0].fix == "name it: backend='slow'"


@pytest.mark.parametrize("name", ["triton", "torch", "numba"])
def test_this_repository_is_listed_and_judges_without_running(name: str, operands: Any) -> None:
    backend = qmm.backends()[name]
    assert backend.name == name and backend.kernels
    call = make_call(*operands)
    for kernel in backend.kernels:
        first, second = backend.why_not(call, kernel), backend.why_not(call, kernel)
        assert first == second and all(isinstance(r, Reason) for r in first)


# explain


def test_explain_fields(install: Install, operands: Any) -> None:
    a, w = operands
    install(Fake("x", missing="nothing"))
    out = torch.empty(8, 3).t()
    told = qmm.explain(a.t().contiguous().t(), w, bias=torch.zeros(16)[::2], out=out, activation="relu")
    assert (told.backend, told.kernel) == ("torch", "blocks") and told.config is not None
    assert told.reasons["torch"] == [] and told.reasons["x"]
    assert set(told.kernels) == {"x.one", "x.two", "torch.blocks"} and told.kernels["torch.blocks"] == []
    assert "bias: made contiguous" in told.copies
    assert (told.call.m, told.call.n, told.call.k, told.call.activation) == (3, 8, 64, "relu")
    text = str(told)
    for part in (
        "M=3 N=8 K=64",
        "torch.blocks",
        "int4",
        "x.one",
        "needs its package; got nothing",
        "can run this call",
    ):
        assert part in text, part


def test_explain_tells_copies_of_three_dimensions(operands: Any) -> None:
    _, w = operands
    a = torch.ones(2, 4, 64).transpose(0, 1)
    told = qmm.explain(a, w, out=torch.empty(2, 4, 8).transpose(0, 1))
    assert [text.partition(":")[0] for text in told.copies] == ["a", "out"]
    assert qmm.explain(torch.ones(2, 4, 64), w).copies == []


def test_explain_of_a_call_that_would_raise(install: Install, operands: Any) -> None:
    install(Fake("x", missing="nothing"))
    told = qmm.explain(*operands, backend="x")
    assert told.backend is None and told.kernel is None and told.config is None
    assert "nothing: the call would raise" in str(told)


def test_explain_runs_and_prepares_nothing(install: Install, operands: Any) -> None:
    fake = Fake("x", tier=Tier.SPECIALISED)
    install(fake)
    assert qmm.explain(*operands).backend == "x" and not fake.ran and operands[1].state == "canonical"


# the warning about slow kernels


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that say they are on a GPU, and a process that has not warned yet."""
    from dataclasses import replace

    monkeypatch.setattr(dispatch, "_warned", set())
    real = make_call

    def pretend(*args: Any, **options: Any) -> qmm.MatmulCall:
        return replace(real(*args, **options), device=torch.device("cuda"))

    import sys

    monkeypatch.setattr(sys.modules["qmm.matmul"], "make_call", pretend)
    monkeypatch.setattr(sys.modules["qmm.explain"], "make_call", pretend)


@pytest.mark.usefixtures("on_gpu")
def test_slow_warning_once_and_at_the_users_line(install: Install) -> None:
    install(Fake("x", missing="nothing", tier=Tier.PORTABLE), Fake("slow"), torch_too=False)
    a, w = torch.ones(3, 64), qmm.quantize(torch.ones(8, 64))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        qmm.explain(a, w)  # explaining uses up no warning
        assert not seen
        qmm.matmul(a, w)
        qmm.matmul(a, w)
        qmm.matmul(a[:1], w)
    assert [s.category for s in seen] == [SlowKernelWarning]
    assert seen[0].filename == __file__
    assert "fell back to slow.one (fills), which is slow on a GPU; passed over: x.one (its package)" in str(
        seen[0].message
    )


@pytest.mark.usefixtures("on_gpu")
def test_no_warning_where_the_slow_kernel_was_named(install: Install) -> None:
    install(Fake("slow"))
    call = qmm.explain(torch.ones(3, 64), qmm.quantize(torch.ones(8, 64))).call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.warn_if_slow(dispatch.select(call, "slow"), call)


# plans that a weight remembers


def test_plans_follow_what_changes(install: Install, operands: Any) -> None:
    a, w = operands
    fake = Fake("x")
    install(fake)
    right = qmm.matmul(a, w)
    for _ in range(2):
        with qmm.use_backend("x"):
            assert bool((qmm.matmul(a, w) == 1).all())
        assert torch.equal(qmm.matmul(a, w), right)
    larger = qmm.quantize(torch.ones(8, 64) * 3, group_size=32)
    w.copy_(larger)
    assert torch.equal(qmm.matmul(a, w), qmm.matmul(a, larger)) and not torch.equal(qmm.matmul(a, w), right)


def test_plans_follow_the_range_of_the_values() -> None:
    """float16 operands are allowed only while the weight fits float16: copy_ may end that."""
    a = torch.full((1, 32), 1e-3, dtype=torch.float16)
    codes = torch.full((32, 2), 15)
    small, large = (
        qmm.QuantizedWeight.from_codes(codes, torch.full((1, 2), s), bits=4, group_size=32)
        for s in (1.0, 1e5)
    )
    qmm.matmul(a, small)
    small.copy_(large)
    assert torch.equal(qmm.matmul(a, small), qmm.matmul(a, large)) and bool(
        torch.isfinite(qmm.matmul(a, small)).all()
    )


def test_plans_are_bounded(operands: Any) -> None:
    _, w = operands
    for m in range(1, 400):
        qmm.matmul(torch.ones(m, 64), w)
    assert len(w._plans) <= 256


# backends from other packages


class Point:
    """An entry point."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self.value, self.load = name, f"{name}_package:BACKEND", load


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Backend]]:
    def put(*points: Point) -> dict[str, Backend]:
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "qmm.backends" else ())
        monkeypatch.setattr(registry, "_found", None)
        return qmm.backends()

    return put


def fail(error: BaseException) -> Any:
    raise error


def test_the_real_entry_points_are_asked() -> None:
    assert registry.entry_points is importlib.metadata.entry_points


def test_outside_backends_come_last_and_sorted(entry_points: Any, operands: Any) -> None:
    table = entry_points(Point("b", lambda: Fake("b")), Point("a", lambda: Fake("a")))
    assert list(table) == ["triton", "torch", "numba", "a", "b"]
    assert chosen(*operands, backend="b") == "b"


def test_a_class_is_instantiated(entry_points: Any) -> None:
    class Mine(Fake):
        def __init__(self) -> None:
            super().__init__("mine")

    assert isinstance(entry_points(Point("mine", lambda: Mine))["mine"], Mine)


class Nameless(Fake):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (lambda: fail(ImportError("no such library")), "ImportError: no such library"),
        (lambda: fail(SyntaxError("bad")), "SyntaxError: bad"),
        (lambda: Backend, "abstract class"),
        (lambda: object(), "is no qmm.Backend named 'broken'"),
        (lambda: Fake("other"), "is no qmm.Backend named 'broken'"),
        (lambda: Nameless, "is no qmm.Backend named 'broken'"),
        (lambda: None, "is no qmm.Backend named 'broken'"),
    ],
    ids=["import fails", "syntax error", "abstract", "no backend", "another name", "no name", "None"],
)
def test_broken_backends_are_listed_with_the_reason(
    entry_points: Any, operands: Any, load: Any, text: str
) -> None:
    table = entry_points(Point("broken", load))
    (reason,) = table["broken"].environment()
    assert text in reason.got
    assert chosen(*operands) == "torch"
    with pytest.raises(UnsupportedError) as caught:
        qmm.matmul(*operands, backend="broken")
    assert caught.value.reasons["broken"] == [reason]
    told = qmm.explain(*operands)
    assert told.reasons["broken"] == [reason] and list(table)[:3] == ["triton", "torch", "numba"]


def test_names_of_this_repository_are_not_taken_over(entry_points: Any) -> None:
    loaded: list[str] = []
    table = entry_points(
        Point("torch", lambda: loaded.append("torch")), Point("auto", lambda: loaded.append("auto"))
    )
    assert type(table["torch"]).__name__ == "TorchBackend" and "auto" not in table and not loaded


def test_a_backend_that_asks_while_it_is_loaded(entry_points: Any) -> None:
    """No deadlock where an outside package calls qmm.backends() as it is imported."""

    def load() -> Backend:
        registry.entry_points = lambda group: ()  # type: ignore[assignment]  # its own point, half loaded
        assert "torch" in qmm.backends()
        return Fake("asks")

    done: list[dict[str, Backend]] = []
    thread = threading.Thread(target=lambda: done.append(entry_points(Point("asks", load))), daemon=True)
    thread.start()
    thread.join(20)
    assert done and "asks" in done[0]


def test_threads_collect_once(entry_points: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    barrier = threading.Barrier(8)

    def load() -> Backend:
        loads.append(1)
        return Fake("mine")

    entry_points()
    monkeypatch.setattr(registry, "entry_points", lambda group: (Point("mine", load),))
    monkeypatch.setattr(registry, "_found", None)

    def ask(_: int) -> Backend:
        barrier.wait(20)
        return qmm.backends()["mine"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(loads) == 1 and all(b is found[0] for b in found)


def test_the_listing_is_a_copy() -> None:
    qmm.backends().clear()
    assert "torch" in qmm.backends()
