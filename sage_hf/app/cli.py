"""The command line `sage-hf env | explain | generate | compare | calibrate | bench | tune | check | warmup`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_hf.app.arguments import CALL_ARGUMENTS, PIPELINE_ARGUMENTS, add_generate_arguments, make_parser
from sage_hf.config import SageConfig
from sage_hf.sparse.config import Sparse
from sage_hf.text import allow_any_text, text_table
from sage_kernels.spec.recipe import RECIPES

if TYPE_CHECKING:
    import torch

# Each command imports the modules that need torch itself, so that help and errors of typing appear at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `sage-hf`, and return its exit code.

    The exit code is 0; 1 if `check` found a wrong kernel; 2 after an error (on stderr); or 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    return _run_guarded(make_parser(arguments), arguments)


def generate_main(
    argv: Sequence[str] | None = None,
    *,
    description: str,
    config: str = "sage3",
    own_config: str | None = None,
    **defaults: object,
) -> int:
    """Run a generating script: parse arguments, render and print the results; return the exit code.

    Args:
        argv: the arguments, without the program's name; None: the command line's.
        description: text for --help.
        config: default recipe, or name or path of the default configuration.
        own_config: path of a default configuration that is used only with the default `pretrained`.
        defaults: default values of other arguments, by their names ("pretrained", "frames", "cpu_offload", …).
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_generate_arguments(parser, default_config=config, **defaults)
    parser.set_defaults(command="generate", own_config=own_config, own_pretrained=defaults.get("pretrained"))
    return _run_guarded(parser, argv)


def _run_guarded(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command and return its exit code; errors of the user or the machine are printed without a traceback."""
    allow_any_text(sys.stdout, sys.stderr)
    args = parser.parse_args(argv)
    try:
        if "recipe" in args:
            args.sage_config = _config(args)  # a wrong name is reported before anything is imported
        return COMMANDS[args.command](args) or 0
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{interrupt}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print("error:", *(line.strip() for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if (message := _message_of_machine(error)) is None:
            raise
        print(message, file=sys.stderr)
        return 2


def _message_of_machine(error: RuntimeError) -> str | None:
    """Return the message for a GPU without enough memory or a kernel that is not available; None for other errors."""
    import torch

    from sage_kernels.dispatch.plan import KernelUnavailableError

    if isinstance(error, torch.OutOfMemoryError):
        return f"error: {error}\nTry less height, width or frames, --cpu-offload or --vae-tiling."
    return f"error: {error}" if isinstance(error, KernelUnavailableError) else None


def _env(args: argparse.Namespace) -> None:
    import torch

    from sage_hf.app.report import device_name, package_versions
    from sage_hf.attention import default_fallback
    from sage_hf.nominal import nominal_request
    from sage_kernels.dispatch.plan import KernelUnavailableError
    from sage_kernels.dispatch.select import select
    from sage_kernels.runtime.toolchain import triton_version

    print("  ".join(f"{name} {number}" for name, number in package_versions().items()))
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in [*devices, torch.device("cpu")]:
        rows = []
        for recipe in RECIPES:
            try:
                predict = select(nominal_request(recipe, device), default_fallback())
            except KernelUnavailableError as error:
                rows.append([recipe, "none", "–", "–", str(error)])
                continue
            kernels = ", ".join(name for name in (predict.kernel, predict.quantizer, predict.backward) if name)
            rows.append([recipe, predict.recipe, kernels, predict.numerics, predict.reason])
        print(f"\n{device}: {device_name(device)}")
        print(text_table(["recipe", "runs", "kernels", "numerics", "why"], rows))
        if device.type == "cuda":
            print(_costs_note(device))
    if triton_version() is None:
        print(
            "\nTriton is not installed, and most kernels are written in it: GPUs run exact attention, but for calls of "
            "sage2, sage1 and sage_bwd on Hopper, without a mask or with a key-padding mask. Where there is a wheel, "
            "`pip install triton` brings it."
        )
    if not devices:
        print("\nNo CUDA device: low-bit recipes are emulated, with their true numerics and without their speed.")


def _costs_note(device: torch.device) -> str:
    """Return a line that names the table of costs by which calls choose between low bits and exact attention."""
    import torch

    from sage_kernels.dispatch import cost_model
    from sage_kernels.dispatch.select import routing

    if not routing():
        return "costs: not used (SAGE_KERNELS_ROUTING=0): low bits run wherever a kernel takes calls of that size"
    return cost_model.describe_costs(torch.cuda.get_device_capability(device))


def _gpu(name: str) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("this command needs a GPU, and PyTorch finds none here")
    return torch.device(name)


def _warmup(args: argparse.Namespace) -> None:
    config = SageConfig.from_name(args.config)
    from sage_hf.app.warmup import warm_up

    start = time.perf_counter()
    calls = warm_up(config, _gpu(args.device), args.head_dim)
    print(f"ran {calls} calls in {time.perf_counter() - start:.0f} s; their kernels are in the caches")


def _tune(args: argparse.Namespace) -> None:
    from sage_hf.tune.tune import SECONDS, tune
    from sage_kernels.dispatch import cost_model

    seconds = SECONDS if args.seconds is None else args.seconds
    table = tune(_gpu(args.device), seconds, progress=lambda text: print(text, file=sys.stderr))
    path = args.output or cost_model.tuned_path(table.gpu)
    table.write(path)
    print(f"wrote {path}: {len(table.curves)} curves of {table.gpu}")


def _check(args: argparse.Namespace) -> int:
    from sage_hf.app.pipelines import pick_device
    from sage_hf.app.report import device_name
    from sage_hf.bench import check

    device = pick_device(args.device)
    seconds = check.SECONDS if args.seconds is None else args.seconds
    result = check.run(device, seconds, progress=lambda text: print(text, file=sys.stderr))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{device}: {device_name(device)}")
    print(check.text(result))
    return 1 if check.failed(result) else 0


def _explain(args: argparse.Namespace) -> None:
    from sage_hf.app.pipelines import pick_device
    from sage_hf.app.prediction import predict

    print(predict(args.pretrained, args.sage_config, pick_device(args.device)))


def _bench(args: argparse.Namespace) -> None:
    from sage_hf.bench.command import execute

    execute(args)


def _generate(args: argparse.Namespace) -> None:
    from sage_hf.app.generate import GenerateOptions, format_outcome, generate

    names = (*PIPELINE_ARGUMENTS, "compare", "fps", "output", "ulysses", "ring")
    options = GenerateOptions(
        config=args.sage_config,
        label=Path(_name(args)).stem,
        prompts=tuple(args.prompt),
        **{name: getattr(args, name) for name in names},
    )
    written: list[str] = []

    def on_written(path: Path) -> None:
        written.append(path.name)
        print(f"wrote {path}", file=sys.stderr)

    try:
        report = generate(options, on_written)
    except KeyboardInterrupt:
        files = f"{', '.join(written)} in {options.output}" if written else "nothing"
        raise KeyboardInterrupt(f"; written: {files}") from None
    if not options.processes.is_first:
        return
    if getattr(args, "html", None) is not None:
        from sage_hf.app.html_report import comparison_page

        args.html.write_text(comparison_page(report), encoding="utf-8")
        on_written(args.html)
    print(format_outcome(report))


def _compare(args: argparse.Namespace) -> None:
    if args.text is None:
        _generate(args)
        return
    if args.html is not None:
        raise ValueError("--html is for renderings: leave it out with --text")
    if args.prompt:
        raise ValueError("--text compares a language model's predictions, --prompt renderings: give one of them")
    _refuse_settings_of_renderings(args, output=Path("output"))
    if args.pretrained is None:
        raise ValueError("--text needs --pretrained: the folder of a causal language model, or its name on the Hub")
    from sage_hf.app.generate import torch_dtype
    from sage_hf.app.language import compare_text
    from sage_hf.app.pipelines import pick_device

    device = pick_device(args.device)
    result = compare_text(
        args.pretrained,
        args.text,
        args.sage_config,
        Path(_name(args)).stem,
        dtype=torch_dtype(args.dtype, device),
        device=device,
        progress=lambda line: print(line, file=sys.stderr),
    )
    print(result)


def _refuse_settings_of_renderings(args: argparse.Namespace, **more: object) -> None:
    """Raise ValueError for an argument that has no meaning with --text; `more` holds further arguments' defaults."""
    rendering = dict.fromkeys((*CALL_ARGUMENTS, "fps"))
    rendering |= {"seed": 0, "cpu_offload": False, "vae_tiling": False, "ulysses": 1, "ring": 1, **more}
    if misplaced := [name for name, default in rendering.items() if getattr(args, name, default) != default]:
        raise ValueError(f"--{misplaced[0].replace('_', '-')} is for renderings: leave it out with --text")


def _calibrate(args: argparse.Namespace) -> None:
    from sage_hf.app.calibrate import calibrate
    from sage_hf.app.html_report import calibration_page
    from sage_hf.app.report import package_versions

    model, prompts, settings = (_language_prompts if args.prompts is None else _pipeline_prompts)(args)
    held_out = len(prompts) // 4 if args.held_out is None else args.held_out
    if not 0 <= held_out < len(prompts):
        raise ValueError(f"--held-out must leave a prompt of {len(prompts)}, got {held_out}")
    num_calibrated = len(prompts) - held_out
    result = calibrate(
        model,
        prompts[:num_calibrated],
        args.budget,
        recipes=args.recipes,
        held_out=prompts[num_calibrated:],
        keep_sensitive=args.keep_sensitive,
        sparse=[Sparse(keep=share) for share in args.keep],
        kv_caches=args.kv_cache,
        seed=args.seed,
        measurements=args.output.with_suffix(".measurements.json"),
        **settings,
    )
    result.config.save(args.output)
    written = [args.output]
    if args.html is not None:
        args.html.write_text(calibration_page(result, package_versions()), encoding="utf-8")
        written.append(args.html)
    print(result)
    print("\n".join(f"wrote {path}" for path in written), file=sys.stderr)


def _pipeline_prompts(args: argparse.Namespace) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the pipeline, its prompts and the arguments of its call."""
    from sage_hf.app.generate import GenerateOptions, call_settings, torch_dtype
    from sage_hf.app.pipelines import folder_or_name, generation_defaults, load_pipeline, pick_device

    try:
        lines = args.prompts.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts: cannot read {args.prompts}: {error}") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ValueError(f"--prompts: {args.prompts} has no line of text")
    given = {name: getattr(args, name) for name in PIPELINE_ARGUMENTS}
    options = GenerateOptions(SageConfig(), "calibrate", args.output.absolute().parent, prompts, **given)
    device = pick_device(args.device)
    pretrained = folder_or_name(args.pretrained)
    pipe = load_pipeline(
        pretrained,
        dtype=torch_dtype(args.dtype, device),
        device=device,
        cpu_offload=args.cpu_offload,
        vae_tiling=args.vae_tiling,
    )
    return pipe, list(prompts), call_settings(pipe, options, generation_defaults(pretrained))


def _language_prompts(args: argparse.Namespace) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the language model, the text's windows of tokens, and no settings."""
    from sage_hf.app.generate import torch_dtype
    from sage_hf.app.language import load_language_model, read_windows
    from sage_hf.app.pipelines import folder_or_name, pick_device

    _refuse_settings_of_renderings(args)
    device = pick_device(args.device)
    pretrained = folder_or_name(args.pretrained)
    model, tokenizer = load_language_model(pretrained, torch_dtype(args.dtype, device), device)
    return model, list(read_windows(args.text, model, tokenizer)), {}


def _name(args: argparse.Namespace) -> str:
    """Return the name of the recipe or configuration that the user asked for, or the command's default."""
    own_config = getattr(args, "own_config", None)
    if own_config is not None and args.pretrained != args.own_pretrained:
        own_config = None
    return next(name for name in (args.recipe, args.config, own_config, args.default_config) if name is not None)


def _config(args: argparse.Namespace) -> SageConfig:
    if args.recipe is not None and args.recipe not in RECIPES:
        raise ValueError(f"--recipe: unknown recipe {args.recipe!r}; recipes are: {', '.join(sorted(RECIPES))}")
    config = SageConfig.from_name(_name(args))
    if args.keep is not None:
        before = config.sparse if isinstance(config.sparse, Sparse) else Sparse()
        config = replace(config, sparse="model" if args.keep == "model" else replace(before, keep=args.keep))
    return config if args.fallback is None else replace(config, fallback=args.fallback)


COMMANDS = {
    "env": _env,
    "explain": _explain,
    "generate": _generate,
    "compare": _compare,
    "calibrate": _calibrate,
    "bench": _bench,
    "tune": _tune,
    "check": _check,
    "warmup": _warmup,
}


if __name__ == "__main__":
    sys.exit(main())
