"""Many requests to resize cause few resizes, and each caller gets an answer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from greenroom.errors import BudgetError
from greenroom.server.api.shared import resizes
from greenroom.server.api.shared.resizes import CacheResizer
from tests.server.conftest import NAME, Serve, fake_engine, wait_for

KEY = "secret"
HEADERS = {"x-api-key": KEY}
TEXT: Any = {"model": NAME, "prompt": "Hello"}


class Cache:
    """A fake cache that records sizes; a resize ends when `open` is set."""

    def __init__(self) -> None:
        self.sizes: list[str] = []
        self.open = threading.Event()
        self.open.set()

    def resize(self, size: str) -> int:
        self.sizes.append(size)
        assert self.open.wait(10)
        if size.startswith("0"):
            raise BudgetError(f"cache is {size}")
        return int(size.rstrip("%"))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(resizes, "REST_S", 0.05)
    return Cache()


async def wait_for_resizes(cache: Cache, count: int) -> None:
    while len(cache.sizes) < count:
        await asyncio.sleep(0.001)


def storm(cache: Cache, sizes: list[str]) -> list[Any]:
    """Resize to all sizes at once; the others come during the first."""

    async def run() -> list[Any]:
        resize = CacheResizer(cache.resize)
        cache.open.clear()
        tasks = [asyncio.ensure_future(resize(sizes[0]))]
        await wait_for_resizes(cache, 1)
        tasks += [asyncio.ensure_future(resize(size)) for size in sizes[1:]]
        await asyncio.sleep(0.01)
        cache.open.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_only_the_latest_waiting_size_is_applied(cache: Cache) -> None:
    results = storm(cache, ["50%", *(f"{10 + i % 80}%" for i in range(1500)), "25%"])
    assert cache.sizes == ["50%", "25%"]
    assert results == [50] + [25] * 1501


def test_an_invalid_size_is_an_error_only_for_its_caller(cache: Cache) -> None:
    results = storm(cache, ["50%", "20%", "30%", "0%", "00%"])
    assert cache.sizes == ["50%", "00%", "0%", "30%"]
    assert results[:3] == [50, 30, 30]
    assert [str(each) for each in results[3:]] == ["cache is 0%", "cache is 00%"]


def test_a_cancelled_caller_does_not_affect_others(cache: Cache) -> None:
    async def run() -> int:
        resize = CacheResizer(cache.resize)
        cache.open.clear()
        cancelled = [asyncio.ensure_future(resize("50%"))]
        await wait_for_resizes(cache, 1)
        cancelled += [asyncio.ensure_future(resize(size)) for size in ("20%", "0%")]
        remaining = asyncio.ensure_future(resize("30%"))
        await asyncio.sleep(0.01)
        for each in cancelled:
            each.cancel()
        cache.open.set()
        return await remaining

    assert asyncio.run(run()) == 30


def test_resizes_are_separated_by_a_pause(cache: Cache) -> None:
    async def run() -> float:
        resize, loop = CacheResizer(cache.resize), asyncio.get_running_loop()
        began = loop.time()
        for size in ("50%", "20%", "50%"):
            await resize(size)
        return loop.time() - began

    assert asyncio.run(run()) >= 2 * resizes.REST_S
    assert cache.sizes == ["50%", "20%", "50%"]


def test_a_storm_over_http(serve: Serve, cache: Cache) -> None:
    engine = fake_engine("Hi")
    engine.resize = cache.resize  # type: ignore[method-assign, assignment]
    running = serve(engine, key=KEY)
    cache.open.clear()
    body = {"cache": "30%"}
    with ThreadPoolExecutor(20) as pool:
        responses = [
            pool.submit(running.post, "/v1/admin/cache", body, headers=HEADERS) for _ in range(20)
        ]
        wait_for(lambda: cache.sizes and len(running.server.server_state.tasks) == 20)
        # Those that wait hold no thread that others need.
        assert running.post("/v1/completions", TEXT, headers=HEADERS).status_code == 200
        cache.open.set()
    assert [each.result().json() for each in responses] == [{"slots": 30}] * 20
    assert len(cache.sizes) <= 5
