"""The arguments of `sage-hf`'s commands, parsed without torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import sage_hf
from sage_hf.config import SageConfig
from sage_kernels.spec.kv_format import FORMATS
from sage_kernels.spec.options import FALLBACKS
from sage_kernels.spec.recipe import RECIPES

CALL_ARGUMENTS = ("steps", "height", "width", "frames", "guidance_scale")
PIPELINE_ARGUMENTS = ("pretrained", *CALL_ARGUMENTS, "seed", "dtype", "device", "cpu_offload", "vae_tiling")
"""Names of the arguments of loading a pipeline and of its call."""


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of `sage-hf`; of `bench`, only if `arguments` begin with it."""
    parser = argparse.ArgumentParser(prog="sage-hf", description="Low-bit attention for diffusers and transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {sage_hf.__version__}")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="env | explain | generate | compare | calibrate | bench | tune | check | warmup",
    )
    commands.add_parser("env", help="versions, GPUs, and which recipe runs natively on each")
    command = commands.add_parser("explain", help="which kernel each layer of a model will run here; loads no weights")
    command.add_argument("--pretrained", required=True, metavar="ID_OR_FOLDER", help="of diffusers or transformers")
    command.add_argument("--device", help="cpu, cuda, cuda:1 (default: the first GPU, else the CPU)")
    _add_recipe_arguments(command)
    command = commands.add_parser("generate", help="render prompts with low-bit attention, and write a report")
    add_generate_arguments(command)
    command = commands.add_parser(
        "compare", help="the same and exact attention, with every layer's error; or a language model's predictions"
    )
    add_generate_arguments(command, compare=True)
    command.add_argument(
        "--text", type=_path, metavar="FILE", help="perplexity and divergence of a causal language model on this text"
    )
    _add_html_argument(command)
    command = commands.add_parser(
        "calibrate", help="find the fastest mix of recipes whose error of a model's output is within a budget"
    )
    _add_calibrate_arguments(command)
    command = commands.add_parser("bench", help="speed, error and memory of attention kernels on this GPU")
    if arguments[:1] == ["bench"]:  # importing its choices, models and kernels, takes seconds
        from sage_hf.bench.command import add_arguments

        add_arguments(command)
    command = commands.add_parser("tune", help="time calls once per GPU (minutes), to choose kernels by")
    command.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: the first GPU)")
    command.add_argument("--seconds", type=_seconds, help="of compiling and measuring, at most (default: 420)")
    command.add_argument(
        "--output", type=_file, metavar="JSON", help="default: where calls look for it, in the user's cache folder"
    )
    command = commands.add_parser("check", help="run every kernel on small calls, and compare it with the reference")
    command.add_argument("--device", help="cpu, cuda, cuda:1 (default: the first GPU, else the CPU)")
    command.add_argument("--seconds", type=_seconds, help="after which no call is begun (default: a minute)")
    command.add_argument("--json", type=_file, metavar="FILE", help="write the result there too")
    command = commands.add_parser("warmup", help="compile the kernels of a recipe or configuration for this GPU")
    command.add_argument("config", nargs="?", default="sage3", metavar="NAME_OR_JSON", help="default: sage3")
    command.add_argument("--head-dim", type=int, nargs="+", default=(64, 128), metavar="N", help="default: 64 128")
    command.add_argument("--device", default="cuda", help="cuda, cuda:1 (default: the first GPU)")
    return parser


def add_generate_arguments(parser: argparse.ArgumentParser, default_config: str = "sage3", **defaults: object) -> None:
    """Add the arguments of `GenerateOptions` to the parser, with these defaults."""
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="what to render; repeatable")
    parser.add_argument("--pretrained", metavar="ID_OR_FOLDER", help="diffusers pipeline (default: the tiny model)")
    _add_recipe_arguments(parser, default_config)
    parser.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=False, help="also with exact attention, same seed"
    )
    parser.add_argument("--fps", type=int, help="frames per second of the files (default: 8)")
    sharded = "N processes of torchrun, a GPU each, split the tokens of a step, and "
    parser.add_argument("--ulysses", type=int, default=1, metavar="N", help=f"{sharded}exchange tokens for heads")
    parser.add_argument("--ring", type=int, default=1, metavar="N", help=f"{sharded}gather keys and values")
    parser.add_argument("--output", type=_path, default=Path("output"), metavar="DIR", help="default: output")
    _add_pipeline_arguments(parser)
    parser.set_defaults(**defaults)


def _add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of loading a pipeline and of its call."""
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--height", type=int, help="pixels")
    parser.add_argument("--width", type=int, help="pixels")
    parser.add_argument("--frames", type=int, help="frames of each video")
    parser.add_argument("--guidance-scale", type=float, help="classifier-free guidance")
    parser.add_argument("--seed", type=int, default=0, help="of every prompt (default: 0)")
    parser.add_argument("--dtype", help="float32, bfloat16, float16 (default: bfloat16, on a CPU float32)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: the first GPU, else the CPU)")
    parser.add_argument(
        "--cpu-offload",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep only the running model on the GPU",
    )
    parser.add_argument(
        "--vae-tiling", action=argparse.BooleanOptionalAction, default=False, help="decode in tiles to save memory"
    )


def _add_html_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=_file, metavar="FILE", help="also write the result as one self-contained page")


def _add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pretrained", required=True, metavar="ID_OR_FOLDER", help="pipeline or language model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=_path, metavar="FILE", help="for a pipeline: a file with one prompt per line")
    source.add_argument("--text", type=_path, metavar="FILE", help="of a causal language model: a text, in windows")
    parser.add_argument("--budget", type=float, default=0.02, help="largest error of the output (default: 0.02)")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=("sage3", "sage2"),
        metavar="RECIPE",
        help="fastest first (default: sage3 sage2)",
    )
    parser.add_argument(
        "--keep", type=float, nargs="+", default=(), metavar="SHARE", help="shares of sparse self-attention to try"
    )
    parser.add_argument(
        "--kv-cache",
        nargs="+",
        default=(),
        metavar="FORMAT",
        help=f"formats of the KV cache to try: {' '.join(FORMATS)}",
    )
    parser.add_argument("--keep-sensitive", type=int, default=0, metavar="N", help="layers that always stay exact")
    parser.add_argument(
        "--held-out", type=int, metavar="N", help="last prompts, which only test the result (default: a quarter)"
    )
    parser.add_argument(
        "--output",
        type=_file,
        default=Path("calibrated.json"),
        metavar="JSON",
        help="default: calibrated.json; a second run continues from calibrated.measurements.json",
    )
    _add_html_argument(parser)
    _add_pipeline_arguments(parser)


def _keep(text: str) -> float | str:
    """Return the value of --keep: a number, or "model"."""
    return text if text == "model" else float(text)


def _seconds(text: str) -> float:
    """Return the value of --seconds."""
    if not (seconds := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return seconds


def _path(text: str) -> Path:
    """Return the path, with the `~` that a shell leaves in `--output=~/folder` expanded."""
    return Path(os.path.expanduser(text))


def _file(text: str) -> Path:
    """Return the path of a file to write; a missing folder is reported now, not after hours of work."""
    path = _path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} into")
    return path


def _add_recipe_arguments(parser: argparse.ArgumentParser, default_config: str = "sage3") -> None:
    parser.set_defaults(default_config=default_config)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--recipe", help=f"{', '.join(RECIPES)} (default: {default_config})")
    group.add_argument(
        "--config", metavar="NAME_OR_JSON", help=f"recipe with exceptions: {', '.join(SageConfig.names())}, or a file"
    )
    parser.add_argument(
        "--fallback",
        help=f"where the recipe is not native: {', '.join(FALLBACKS)} (default: $SAGE_HF_FALLBACK, else native)",
    )
    parser.add_argument(
        "--keep",
        type=_keep,
        metavar="SHARE",
        help='sparse self-attention: the share of tiles kept, for example .25; "model": as the model\'s '
        "sparse_attention_config says",
    )
