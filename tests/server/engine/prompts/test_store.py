"""Engines that are started again find the prompts of the ones before, and answer the same."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.hf.kv.sizes import kv_bytes
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.runtime.store.disk import CHUNK_BYTES
from greenroom.runtime.store.disk_turns import DiskTurns
from greenroom.server.engine.journal import DISK, Journal, PrefixReuse
from greenroom.server.engine.prefixes import PrefixEntry, as_ids
from greenroom.server.engine.prompts import folder as prompt_folder
from greenroom.server.engine.prompts import store as prompt_store
from greenroom.server.engine.prompts.folder import PromptFolder
from greenroom.server.engine.prompts.setup import ENTRY_BYTES, MOST_TOKENS
from tests.models import cached_tiny
from tests.server.conftest import wait_for
from tests.server.rig import PATIENCE, NotReady, Served, draw, greedy

PROMPT = draw(400, 1)
CONTEXT = 600
Engine = Callable[..., Served]


@pytest.fixture
def engine(tmp_path: Path, no_threads_left: None) -> Iterator[Engine]:
    """`engine(...)` starts an engine with a prompt cache; the one before must be closed."""
    engines: list[Served] = []

    def start(folder: Any = None, **options: Any) -> Served:
        model = folder or cached_tiny("qwen3_moe", tokenizer=True)
        options = {"prompt_cache": str(tmp_path / "prompts"), "context": CONTEXT, **options}
        engines.append(Served(model, **options))
        return engines[-1]

    yield start
    for each in engines:
        each.close()


def stats(served: Served) -> dict[str, int]:
    result: dict[str, int] = served.engine.stats()["prompt_cache"]
    return result


def saved(served: Served) -> dict[str, int]:
    """The statistics once everything is written."""
    wait_for(lambda: not stats(served)["pending"], PATIENCE)
    return stats(served)


def files(tmp_path: Path) -> list[Path]:
    """All files, by the position of their first token."""
    return sorted((tmp_path / "prompts").iterdir(), key=lambda path: path.name.split("-")[1])


def answer(served: Served, ids: list[int], new: int = 6, **options: Any) -> tuple[list[int], int]:
    recorder = served.ask(ids, new, **options)
    reused = recorder.end().reused_tokens
    return recorder.ids, reused


def test_a_restarted_engine_answers_the_same_from_disk(engine: Engine, model: Any) -> None:
    expected = greedy(model, PROMPT, 6)
    first = engine()
    assert "prompt cache: 0 files of this model in " in first.engine.summary
    assert answer(first, PROMPT) == (expected, 0)
    first.close()  # what waits is written
    assert first.engine.stats()["prompt_cache"]["files"] == 2
    again = engine(journal=Journal())
    assert "prompt cache: 2 files of this model" in again.engine.summary
    assert answer(again, PROMPT) == (expected, 399)
    assert again.engine.journal.events[0] == PrefixReuse(0, DISK, 399)
    counted = stats(again)
    assert (counted["hits"], counted["tokens"], counted["damaged"]) == (1, 399, 0)
    assert counted["bytes_read"] > 0
    turn = [*PROMPT, *expected, *draw(20, 3)]  # from memory: nothing more is read
    assert answer(again, turn) == (greedy(model, turn, 6), 405)
    assert stats(again)["hits"] == 1


def test_a_common_beginning_is_read_and_the_rest_computed(engine: Engine, model: Any) -> None:
    first = engine()
    answer(first, PROMPT)
    first.close()
    again = engine()
    for count in (100, 256, 380):
        other = [*PROMPT[:count], *draw(30, count)]
        ids, reused = answer(again, other)
        assert ids == greedy(model, other, 6)
        assert reused == count
    assert answer(again, draw(100, 9))[1] == 0
    assert stats(again)["misses"] >= 1


def bits(served: Served, ids: list[int]) -> Any:
    """The tokens of an answer with their log-probabilities, to the last bit."""
    recorder = served.ask(ids, 6, top_logprobs=5)
    recorder.end()
    return recorder.tokens


def test_bits_are_those_of_the_prefix_cache_in_memory(engine: Engine) -> None:
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)
    turn = [*PROMPT, *draw(40, 5)]
    first = engine(folder)
    bits(first, PROMPT)
    first.close()
    memory = engine(folder, prompt_cache=None)
    bits(memory, PROMPT)
    from_memory = bits(memory, turn)
    memory.close()
    assert bits(engine(folder), turn) == from_memory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant_answers_are_those_without_the_cache(engine: Engine, dtype: str) -> None:
    options = {"hidden_size": 64, "head_dim": 16} if dtype == "bfloat16" else {}
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype=dtype, **options)
    exact: dict[str, Any] = {"batch_invariant": True, "prefill_chunk": 16}
    turn = [*PROMPT, *draw(40, 5)]
    alone = engine(folder, prompt_cache=None, no_prefix_reuse=True, **exact)
    expected = bits(alone, turn)
    alone.close()
    first = engine(folder, **exact)
    several = [first.ask(PROMPT, 6), *(first.ask(draw(50, seed), 20) for seed in range(3))]
    for each in several:
        each.end()
    first.close()
    again = engine(folder, **exact)
    recorder = again.ask(turn, 6, top_logprobs=5)
    assert recorder.end().reused_tokens == 400
    assert recorder.tokens == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deepseek_v2", "dynamic"),
        ("gpt_oss", "dynamic"),
        ("mixtral", "dynamic"),
        ("gemma4", "dynamic"),
        ("qwen3_moe", "int8"),
        ("gpt_oss", "int4"),
    ],
)
def test_other_kinds_of_attention(engine: Engine, name: str, kind: str) -> None:
    """Sliding windows are reused at the end of the earlier answer, as in memory."""
    folder = cached_tiny(name, tokenizer=True)
    engine = partial(engine, kv=kind)
    first, memory = engine(folder), engine(folder, prompt_cache=None)
    ids, _ = answer(first, PROMPT)
    first.close()
    turn = [*PROMPT, *ids, *draw(20, 5)]
    answer(memory, PROMPT)
    expected = bits(memory, turn)
    again = engine(folder)
    recorder = again.ask(turn, 6, top_logprobs=5)
    assert recorder.end().reused_tokens == 405
    assert recorder.tokens == expected
    shorter = [*PROMPT[:300], *draw(20, 5)]
    assert answer(again, shorter)[1] == (0 if name == "gpt_oss" else 300)


def test_models_without_keys_and_values_of_tokens_are_refused() -> None:
    with pytest.raises(NotReady, match="--prompt-cache cannot be used: the KV cache of"):
        Served(cached_tiny("qwen3_next", tokenizer=True), prompt_cache="unused", context=64)
    assert not Path("unused").exists()


def test_another_setting_does_not_see_the_files(engine: Engine, tmp_path: Path) -> None:
    first = engine()
    answer(first, PROMPT)
    first.close()
    for options in ({"prefill_chunk": 64}, {"batch_invariant": True}):
        again = engine(**options)
        assert answer(again, PROMPT)[1] == 0
        again.close()
    assert answer(engine(), PROMPT)[1] == 399


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_not_believed(
    engine: Engine, model: Any, tmp_path: Path, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine()
    answer(first, PROMPT)
    first.close()
    path = files(tmp_path)[which]
    content = bytearray(path.read_bytes())
    content[-100] ^= 8
    path.write_bytes(content)
    again = engine()
    assert answer(again, PROMPT) == (greedy(model, PROMPT, 6), 256 * which)
    assert stats(again)["damaged"] == 1
    assert len([r for r in caplog.records if "is not used and removed" in r.getMessage()]) == 1


def test_files_that_vanish_while_the_engine_runs(
    engine: Engine, model: Any, tmp_path: Path
) -> None:
    first = engine()
    answer(first, PROMPT)
    first.close()
    again = engine()
    for path in files(tmp_path):
        path.unlink()
    assert answer(again, PROMPT) == (greedy(model, PROMPT, 6), 0)
    assert saved(again)["files"] == 2  # written again
    assert stats(again)["damaged"] == 0


def test_a_folder_that_vanishes_or_is_full_costs_one_warning(
    engine: Engine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    s = engine()

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prompt_folder, "write_segment", full)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            ids = draw(100, seed)
            assert answer(s, ids)[0] == greedy(model, ids, 6)
            saved(s)
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "prompts")
        assert answer(s, PROMPT)[0] == greedy(model, PROMPT, 6)
        saved(s)
    (record,) = [r for r in caplog.records if "prompts are not stored" in r.getMessage()]
    assert record.getMessage().endswith("No space left on device; answers are not affected")
    assert stats(s)["bytes_written"] == 0


def test_an_unexpected_failure_of_the_worker_disturbs_no_answer(
    engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine()
    answer(first, PROMPT)
    first.close()
    again = engine()

    def fails(*arguments: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(prompt_store, "copy_in", fails)
    monkeypatch.setattr(prompt_store, "copy_out", fails)
    assert answer(again, PROMPT) == (greedy(model, PROMPT, 6), 0)


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, Any]]:
    """Reads wait for the event; `begun` is set when the first one begins."""
    go_on, begun = threading.Event(), threading.Event()
    read = prompt_folder.read_data

    def wait_and_read(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return read(*arguments)

    monkeypatch.setattr(prompt_folder, "read_data", wait_and_read)
    yield go_on, begun
    go_on.set()


def test_other_answers_go_on_while_a_prompt_is_read(
    engine: Engine, model: Any, slow_reads: Any
) -> None:
    go_on, begun = slow_reads
    first = engine()
    answer(first, PROMPT)
    first.close()
    again = engine()
    loading = again.ask(PROMPT, 6)
    assert begun.wait(PATIENCE)
    other = draw(30, 4)
    assert answer(again, other) == (greedy(model, other, 6), 0)
    alike = again.ask([*PROMPT, 7], 6)  # it waits for the first one's prefix
    assert loading.finished is None
    go_on.set()
    assert loading.end().reused_tokens == 399
    assert loading.ids == greedy(model, PROMPT, 6)
    assert alike.end().reused_tokens >= 399
    assert alike.ids == greedy(model, [*PROMPT, 7], 6)


def test_a_request_that_is_cancelled_while_it_is_read(engine: Engine, slow_reads: Any) -> None:
    go_on, begun = slow_reads
    first = engine()
    answer(first, PROMPT)
    first.close()
    again = engine()
    loading = again.ask(PROMPT, 6)
    assert begun.wait(PATIENCE)
    loading.cancel()
    go_on.set()
    assert loading.end().reason == "cancelled"
    assert stats(again)["pending"] == 0
    assert again.engine.stats()["kv"]["reserved_bytes"] == 0
    assert answer(again, PROMPT)[1] == 399


def test_a_timeout_while_a_prompt_is_read(engine: Engine, slow_reads: Any) -> None:
    go_on, begun = slow_reads
    first = engine()
    answer(first, PROMPT)
    first.close()
    again = engine()
    loading = again.ask(PROMPT, 6, timeout_s=0.05)
    assert begun.wait(PATIENCE)
    time.sleep(0.06)
    go_on.set()
    assert loading.end().reason in ("timeout", "length")


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, Any]]:
    go_on, begun = threading.Event(), threading.Event()
    write = prompt_folder.write_segment

    def wait_and_write(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        write(*arguments)

    monkeypatch.setattr(prompt_folder, "write_segment", wait_and_write)
    yield go_on, begun
    go_on.set()


def test_writes_wait_for_nobody_and_nobody_for_them(
    engine: Engine, model: Any, slow_writes: Any
) -> None:
    go_on, begun = slow_writes
    s = engine()
    answer(s, PROMPT)
    assert begun.wait(PATIENCE)
    for seed in range(3):
        ids = draw(90, 20 + seed)
        assert answer(s, ids) == (greedy(model, ids, 6), 0)
    assert stats(s)["pending"] >= 2
    go_on.set()
    assert saved(s)["dropped"] == 0
    assert stats(s)["files"] == 5


def test_a_write_waits_for_running_answers_but_not_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_store, "MOST_DELAY_S", PATIENCE)
    s = engine()
    running = s.ask(draw(20, 40), 500)
    assert running.first.wait(PATIENCE)
    answer(s, PROMPT, 1)
    assert stats(s)["pending"] == 1
    assert stats(s)["bytes_written"] == 0 or running.finished is not None
    running.end()
    assert saved(s)["bytes_written"] > 0
    monkeypatch.setattr(prompt_store, "MOST_DELAY_S", 0.0)
    running = s.ask(draw(20, 41), 570)
    assert running.first.wait(PATIENCE)
    answer(s, draw(300, 42), 1)
    assert saved(s)["files"] > 2
    running.cancel()


def test_unwritten_prompts_give_way_to_requests(engine: Engine, slow_writes: Any) -> None:
    """With memory for one context, what waits to be written is dropped for the next request."""
    go_on, begun = slow_writes
    s = engine()
    one = s.engine.greenroom.setup.keys_values.total_bytes(CONTEXT)
    s.close()
    s = engine(kv_memory=one, prefix_share="1%")
    answer(s, PROMPT)
    assert begun.wait(PATIENCE)
    waiting = s.ask(draw(500, 2), 90)
    second = s.ask(draw(500, 3), 90)
    threading.Timer(0.05, go_on.set).start()
    assert waiting.end().reason == second.end().reason == "length"
    assert saved(s)["dropped"] >= 1
    assert s.engine.stats()["kv"]["reserved_bytes"] == 0


def test_slots_make_room_for_keys_and_values_from_disk(engine: Engine, model: Any) -> None:
    sizes = kv_bytes(ModelSkeleton.of(cached_tiny("qwen3_moe", tokenizer=True)).model, block=512)
    token = sum(layer.token for layer in sizes.layers)
    index = (1 << 20) // (token * MOST_TOKENS) * (4 * MOST_TOKENS + ENTRY_BYTES)
    options: dict[str, Any] = {
        "capacity": 16, "slots_at_full_context": 4, "prompt_cache_size": "1MiB",
        "further_budget": token * MOST_TOKENS + CHUNK_BYTES + index,
    }  # fmt: skip
    long, first = draw(590, 8), engine(**options)
    most = first.engine.greenroom.capacity
    answer(first, long)
    first.close()
    again = engine(**options)
    assert answer(again, long) == (greedy(model, long, 6), 589)
    assert again.engine.greenroom.driver.capacity_range[0] < most


def test_the_size_limit_holds(engine: Engine, tmp_path: Path) -> None:
    s = engine(prompt_cache_size="300KiB")
    for seed in range(5):
        answer(s, draw(300, seed))
        saved(s)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 300 << 10
    assert stats(s)["evicted"] > 0
    assert answer(s, draw(300, 4))[1] == 299


def test_an_engine_without_the_option_has_no_statistics(plain: Served) -> None:
    assert "prompt_cache" not in plain.engine.stats()
    assert plain.engine.admission.prompts is None


def test_a_save_may_end_while_the_memory_of_saves_is_counted(
    open_folder: Callable[..., PromptFolder], no_threads_left: None
) -> None:
    """The thread releases it after its second look at the entry."""
    view: Any = SimpleNamespace(demands=0)
    store = prompt_store.PromptStore(open_folder(), DiskTurns(view), 1 << 16, lambda: None)
    store.is_busy = lambda: True
    entry = PrefixEntry(as_ids(range(100)), None, nbytes=8)
    looks = itertools.chain([entry, entry], itertools.repeat(None))

    class EndingSave(prompt_store.PromptSave):
        entry = property(lambda self: next(looks), lambda self, value: None)  # type: ignore

    store._saves.append(EndingSave(None, entry.ids, []))
    store.limit_pending(0, ())
    assert not store._saves
    store.close(0.0)
