"""A warm pool: sandboxes that are started before they are asked for, at most so many at a time."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from metagym.errors import InputError, SandboxError
from metagym.live import Live
from metagym.protocols import Sandbox, SandboxFactory
from metagym.types import Limits, Mount

_Key = tuple[str, tuple[Mount, ...], Limits]


class WarmPool(Live):
    """A `SandboxFactory` that keeps `size` sandboxes ready of what was asked for last.

    Args:
        factory: who starts them; closed with the pool.
        size: sandboxes kept ready of each kind, a kind being an image with its mounts and limits.
        kinds: kinds of which some are kept; the one that was not asked for longest makes room.
        workers: starts at the same time, those that somebody waits for included.

    A sandbox is used once: what was taken is closed by its user, never given back. One that died while it
    waited is replaced.
    """

    def __init__(self, factory: SandboxFactory, *, size: int = 1, kinds: int = 8, workers: int = 4):
        if min(size, kinds, workers) < 1:
            raise InputError(f"size, kinds and workers must be positive, got {size}, {kinds}, {workers}.")
        self.factory, self._size, self._kinds = factory, size, kinds
        self._ready: OrderedDict[_Key, list[Future[Sandbox]]] = OrderedDict()
        self._workers = ThreadPoolExecutor(workers, "sandbox-pool")
        self._lock = threading.Lock()
        self._closed = False

    def start(
        self,
        image: str,
        mounts: Sequence[Mount] = (),
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        labels: Mapping[str, str] | None = None,
    ) -> Sandbox:
        key = (image, tuple(mounts), limits)
        while True:
            with self._lock:
                if self._closed:
                    raise SandboxError("the pool of sandboxes is closed.")
                ready = self._ready.setdefault(key, [])
                self._ready.move_to_end(key)
                warm = ready.pop(0) if ready else None
                ready += [self._submit(key) for _ in range(self._size - len(ready))]
                surplus = [self._ready.popitem(last=False)[1] for _ in range(len(self._ready) - self._kinds)]
            for futures in surplus:
                for future in futures:
                    self._workers.submit(_discard, future)
            if warm is None:
                return self._workers.submit(self.factory.start, image, tuple(mounts), limits, labels).result()
            try:
                sandbox = warm.result()
                if sandbox.exec(":", 30.0).exit_code == 0:
                    return sandbox
                sandbox.close()
            except SandboxError:
                continue  # it died while it waited, or could not be started: try another

    def _submit(self, key: _Key) -> "Future[Sandbox]":
        return self._workers.submit(self.factory.start, *key)

    def snapshot(self, sandbox: Sandbox) -> str:
        return self.factory.snapshot(sandbox)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            futures = [future for ready in self._ready.values() for future in ready]
            self._ready.clear()
        for future in futures:
            _discard(future)
        self._workers.shutdown()
        self.factory.close()


def _discard(future: "Future[Sandbox]") -> None:
    if not future.cancel():
        with contextlib.suppress(Exception):
            future.result().close()
