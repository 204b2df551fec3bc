"""How a run is spread over processes: the accelerator, the frozen target, weights made whole.

Drafters are replicated (DDP) or sharded (FSDP2, DeepSpeed ZeRO) as `accelerate launch` was told.
The target is never prepared: a second DeepSpeed engine would be saved with the first.
"""

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import GradientAccumulationPlugin
from torch import nn

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..configs.training import TrainSection
from ..data.store import RecordStore
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.registry import family_config, runs_target

TargetUse = Literal["replicated", "sharded", "absent"]


def make_accelerator(section: TrainSection, processes: PartialState, folder: Path) -> Accelerator:
    """The accelerator of processes that `data.work.start_processes` has started."""
    on_cpu = processes.device.type == "cpu"
    # Of sharding on a CPU, accelerate must not know that it is one.
    plain = processes.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    accelerator = Accelerator(
        mixed_precision="no",  # see `low_precision`
        # As a plugin, which no setting of the launcher overrides.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=section.accumulation, sync_with_dataloader=False
        ),
        project_dir=str(folder),
        cpu=on_cpu and plain,
    )
    plugin = accelerator.state.deepspeed_plugin if _by_deepspeed(accelerator) else None
    if plugin is not None:  # it clips by itself, and asks for a batch size that it has no use for
        plugin.deepspeed_config["gradient_clipping"] = section.clip
        plugin.deepspeed_config["gradient_accumulation_steps"] = section.accumulation
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        # Offloaded moments are torch's own AdamW's too, and nothing has to be compiled.
        plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = False
        for kind in ("bf16", "fp16"):
            if plugin.deepspeed_config.get(kind, {}).get("enabled") is True:
                raise UserError(
                    f"this DeepSpeed configuration keeps weights in {kind}, and here they stay "
                    f"float32; leave {kind} out of it, and take train.mixed_precision bf16"
                )
    needy = {"train.ema": section.ema > 0, "train.on_policy": section.on_policy is not None}
    for option, asked in needy.items():
        if asked and is_sharded(accelerator):
            raise UserError(
                f"{option} needs the drafter whole in each process, and {name_of(accelerator)} "
                f"spreads it over them; take DDP or ZeRO-2, or leave {option} out"
            )
    return accelerator


def low_precision(section: TrainSection, device: torch.device) -> bool:
    """Whether passes run in bf16, which `Scorer` sees to; weights stay float32 however spread."""
    if section.mixed_precision != "auto":
        return section.mixed_precision == "bf16"
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _by_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether no process holds all weights of what it trains."""
    if _by_deepspeed(accelerator):
        return int(accelerator.state.deepspeed_plugin.zero_stage) == 3
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def name_of(accelerator: Accelerator) -> str:
    """How weights are spread, for people."""
    if _by_deepspeed(accelerator):
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "FSDP"
    return "DDP" if accelerator.num_processes > 1 else "one process"


def hold_head(accelerator: Accelerator, scorer: nn.Module, drafter: Any) -> None:
    """Keep a sharded head whole during all of a pass, as objectives multiply by it themselves.

    ZeRO-3 would learn of that during the first pass, and let a head tied to the embedding go when
    the embedding has been read.
    """
    if not (_by_deepspeed(accelerator) and is_sharded(accelerator)):
        return
    from deepspeed import zero

    model = getattr(drafter, "model", None)
    head = drafter.lm_head if model is None else model.get_output_embeddings()
    zero.register_external_parameter(scorer, head.weight)


class Whole:
    """One process's drafter with all weights, whatever the others hold of them.

    Where weights are replicated this is the trained drafter itself, else a copy that is filled when
    asked for.
    """

    def __init__(self, drafter: Drafter, accelerator: Accelerator):
        assert isinstance(drafter, nn.Module)
        self._accelerator = accelerator
        self._copy = is_sharded(accelerator)
        # Before `prepare`, which would leave nothing whole to copy.
        self._drafter: Any = drafter
        if self._copy and accelerator.is_main_process:
            self._drafter = copy.deepcopy(drafter).cpu()

    def gather(self, prepared: nn.Module) -> Drafter:
        """The drafter within the prepared module; only the main process's is whole.

        To be called by all processes at once.
        """
        if self._copy:
            state = self._accelerator.get_state_dict(prepared)
            if self._accelerator.is_main_process:
                begin = "drafter."
                own = {n.removeprefix(begin): t for n, t in state.items() if n.startswith(begin)}
                self._drafter.load_state_dict(own)
                self._drafter.to(self._accelerator.device)
        drafter: Drafter = self._drafter
        return drafter

    def release(self) -> None:
        """What was gathered is used no more: a copy leaves the device."""
        if self._copy and self._accelerator.is_main_process:
            self._drafter.cpu()


# ---- the target


def target_use(recipe: Recipe, store: RecordStore) -> TargetUse:
    """How the frozen target is kept while training. Raises `UserError` for what cannot be."""
    section = recipe.train
    family, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    if runs_target(config):
        if section.target not in ("auto", "replicated"):
            raise UserError(
                f"drafter.family '{family}' runs the target's own layers, which train.target "
                f"{section.target} does not keep in each process; take auto or replicated"
            )
        return "replicated"
    running = {
        "records without states": store.settings["distributions"] == "none",
        "train.on_policy": section.on_policy is not None,
        "train.samples": section.samples > 0,
    }
    asked = [name for name, needed in running.items() if needed]
    if section.target == "auto":
        return "replicated" if asked else "absent"
    if section.target == "absent" and asked:
        raise UserError(
            f"train.target absent keeps the target's head alone, and {' and '.join(asked)} "
            f"{'need' if len(asked) > 1 else 'needs'} the whole; take auto, replicated or sharded"
        )
    alone = asked[1:] if running["records without states"] else asked
    if section.target == "sharded" and alone:
        raise UserError(
            f"train.target sharded answers all processes at once, and {' and '.join(alone)} "
            f"{'run' if len(alone) > 1 else 'runs'} it in one of them; take replicated"
        )
    return section.target


def placed(target: Target, use: TargetUse, device: torch.device) -> Target:
    """The target as training needs it, on this process's device."""
    if use == "absent":
        target = target.headonly()
    if target.device != device:
        target.model.to(device)  # type: ignore[arg-type]
    return target


def shard(target: Target, processes: PartialState) -> None:
    """Spread the decoder layers over the processes; each is whole only while it runs.

    Embedding and head stay, as their rows are read outside of any pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if processes.num_processes > 1:
        mesh = init_device_mesh(processes.device.type, (processes.num_processes,))
        for layer in target.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    target.model.to(processes.device)
