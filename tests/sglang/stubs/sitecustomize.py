"""For tests on a machine without a GPU: SGLang imports, though its CUDA parts are not there.

Any attribute of `sgl_kernel` and `torchvision` resolves, to something that does nothing when it is called.
SGLang's CPU path does not call them for dense models and mixtures of experts with `torch_native` attention
and `pytorch` sampling; what the tests compare shows that. With quantisation, speculative decoding or other
kernels a server that started with these stubs would compute nonsense, so they refuse to load where there is a
CUDA device: there the real packages belong.
"""

import glob
import importlib.abc
import importlib.machinery
import os
import sys
import types

STUBBED = ("torchvision", "sgl_kernel")

if glob.glob("/dev/nvidia[0-9]*") or os.environ.get("CUDA_VISIBLE_DEVICES"):
    raise RuntimeError(
        f"{__file__} stubs {', '.join(STUBBED)} for tests without a GPU, and there is one here: take this "
        "folder out of PYTHONPATH, and install SGLang with its CUDA parts"
    )


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Nothing(metaclass=_Anything):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return _Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __or__(self, other):
        return self

    def __ror__(self, other):
        return self


class _Stub(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stubbed packages, and makes them."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def _no_pinned_memory(module):
    module._cuda_host_register = lambda *args, **kwargs: None


class _After(importlib.abc.MetaPathFinder):
    """Changes a module once it is loaded: pinning host memory needs CUDA."""

    PATCHES = {"sglang.srt.mem_cache.pool_host.common": _no_pinned_memory}  # noqa: RUF012

    def find_spec(self, name, path=None, target=None):
        patch = self.PATCHES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _After())
sys.meta_path.append(_Finder())
