"""A plugin of vLLM that mends its sampling on CPUs; its processes load it, draftsmith does not.

On CPUs vLLM 0.32 leaves sampling parameters unset where it verifies drafts at T > 0 (upstream issue
55005): the stand-in for its expand kernel writes into a copy. Text is then garbage, without an
error. Where an installed vLLM does so, the stand-in is replaced before kernels are chosen.
"""

from typing import Any


def expand(
    output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *rest: Any
) -> None:
    """Row i of `values` as often as it has draft tokens, which end at `ends[i]`, into `output`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    kept = values.where(values != replace_from, values.new_tensor(replace_to))
    output.copy_(kept.repeat_interleave(counts.long()).to(output.dtype))


def mend() -> bool:
    """Replace the stand-in if it has the fault; whether it had."""
    try:
        import torch
        from vllm.platforms import current_platform
        from vllm.utils import cpu_triton_utils as kernels

        if not current_platform.is_cpu():
            return False
        current_platform.import_kernels()
        out = torch.full((3,), -1.0)
        values, ends = torch.tensor([0.5, 0.7]), torch.tensor([1, 3], dtype=torch.int32)
        kernels._expand_kernel_impl(out, values, ends, 0, 1)
    except (ImportError, AttributeError, TypeError):  # another version has other kernels
        return False
    if torch.equal(out, torch.tensor([0.5, 0.7, 0.7])):
        return False
    kernels._expand_kernel_impl = expand
    print("draftsmith: the expand kernel of this vLLM is replaced (issue 55005)", flush=True)
    return True
