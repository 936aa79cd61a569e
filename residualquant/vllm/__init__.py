"""Serve looped models with vLLM from a compressed paged cache: its scheduler, prefix cache and server, our pages.

| file | holds |
|---|---|
| plugin.py | what is registered with vLLM |
| settings.py | the ``residualquant`` part of vLLM's configuration, and what is refused |
| paged.py | K and V of one layer in pages: write a step, read the past, attend (plain torch) |
| paged_cuda.py | the same by kernels |
| attention.py | the looped attention layer: staging of a step, one custom op |
| layers.py | which of these a layer of a model gets, or vLLM's own attention |
| backend.py | what vLLM asks about it: page size, prefix commit, one step's metadata |
| ouro.py, huginn.py, causal_lm.py | the models over vLLM's layers, and what they share |
| hf_config.py | configuration classes, so that no checkpoint's code is run |
| startup.py | self-check and log lines at start |
| metrics.py | Prometheus metrics of the packed cache |
| serve.py | ``residualquant serve`` |
| decode.py | ``residualquant eval --engine vllm`` |
| bench.py, flash_attention.py | decoding by vLLM timed at a published shape; its BF16 attention as a baseline |

This is the only place that imports vLLM. A token's page is complete when its last loop is done, so three things differ
from a plain cache: the step's own K and V are staged, attention joins the packed past with the staged step (Sec. 4),
and a block is offered to other requests one step later than vLLM would.
"""

from residualquant.errors import ResidualQuantError

VLLM_VERSION = "0.25.1"


def register() -> None:
    """Make looped models known to vLLM; it calls this in each of its processes. Calling it again changes nothing.

    Raises:
        ResidualQuantError: another vLLM than the one this was written for, or no folder for metrics where one is set.
    """
    import vllm

    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise ResidualQuantError(
            f"residualquant's plugin needs vLLM {VLLM_VERSION}, got {vllm.__version__}: install that version, "
            f"or set VLLM_PLUGINS to names that leave residualquant out"
        )
    from residualquant.vllm.serve import check_metrics_folder

    check_metrics_folder()
    from residualquant.vllm.plugin import register_all

    register_all()
