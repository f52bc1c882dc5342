"""The recipes' code; ``recipes/*.py`` at the repository's root only call it."""

import sys

if "vllm" not in sys.modules:
    # TorchRL 0.14.1 imports all of vLLM with torchrl.envs.llm where it is installed: seconds for
    # a trainer rank, which has no use for it. Hidden meanwhile, it can be imported afterwards.
    sys.modules["vllm"] = None
    try:
        import torchrl.envs.llm  # noqa: F401
    finally:
        del sys.modules["vllm"]
