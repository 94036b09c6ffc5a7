"""Self-contained HTML pages of a comparison and of a calibration: they load no other file, font or script."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sage_hf.app.calibrate import Calibration
    from sage_hf.app.report import Report, VideoReport

MEDIA_TYPES = {".mp4": "video/mp4", ".gif": "image/gif", ".png": "image/png"}
DECADES = 2.5
"""Powers of ten between the palest and the strongest colour of a heat map."""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --paper: #fff; --ink: #1c1e22; --faint: #62666e; --line: #dcdfe4; --hot: #f08a24; --bar: #3b6fb5; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e8eaee; --faint: #9aa0aa; --line: #343840; --hot: #b0560a; --bar: #6f9fe0; }
}
body { margin: 2rem auto; max-width: 64rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.note, figcaption, footer { color: var(--faint); font-size: .875rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.heat { text-align: center; border: 1px solid var(--paper);
  background: color-mix(in srgb, var(--hot) calc(var(--heat) * 1%), var(--paper)); }
td.heat small { display: block; opacity: .8; }
pre { padding: .8rem; border: 1px solid var(--line); border-radius: .3rem; font-size: .8rem; overflow-x: auto; }
.pairs { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { flex: 1 1 20rem; margin: 0; max-width: 40rem; }
.stage { position: relative; --at: 50%; overflow: hidden; border: 1px solid var(--line); }
.stage > video, .stage > img { display: block; width: 100%; image-rendering: auto; }
.stage > .after { position: absolute; inset: 0; height: 100%; clip-path: inset(0 0 0 var(--at)); }
.stage::after { content: ""; position: absolute; top: 0; bottom: 0; left: var(--at); width: 2px; background: #fff;
  mix-blend-mode: difference; }
figure input { width: 100%; margin: .4rem 0 0; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; }
.bars { display: grid; grid-template-columns: minmax(8rem, auto) 1fr auto; gap: .2rem .8rem; align-items: center;
  font-size: .875rem; }
.bars i { display: block; height: .8rem; background: var(--bar); min-width: 1px; }
.bars i.over { background: var(--hot); }
</style>
</head>
<body>
<h1>$title</h1>
$body
<footer><p>$versions</p></footer>
<script>
for (const figure of document.querySelectorAll("figure.pair")) {
  const stage = figure.querySelector(".stage"), slider = figure.querySelector("input");
  slider.addEventListener("input", () => stage.style.setProperty("--at", slider.value + "%"));
  const [first, second] = figure.querySelectorAll("video");
  if (first && second) {
    first.addEventListener("timeupdate", () => {
      if (Math.abs(first.currentTime - second.currentTime) > 0.05) second.currentTime = first.currentTime;
    });
  }
}
</script>
</body>
</html>
""")


def comparison_page(report: Report) -> str:
    """Return the page of a comparison: clips under a slider, times and errors, a heat map of layers, and the plan."""
    label = next((name for video in report.videos for name in video.seconds if name != "exact"), "")
    rows = [
        [
            video.prompt,
            *(f"{video.seconds[name]:.2f}" if name in video.seconds else "–" for name in ("exact", label)),
            _number(video.psnr, ".2f"),
            _number(video.ssim, ".4f"),
        ]
        for video in report.videos
    ]
    parts = [f'<p class="note">{escape(f"{report.pretrained} on {report.device}, {report.dtype}")}</p>']
    if not report.complete:
        parts.append("<p><strong>Not complete: still running, or interrupted.</strong></p>")
    pairs = "".join(_pair(report.output, video, label) for video in report.videos)
    parts.append(f'<div class="pairs">{pairs}</div>')
    parts += ["<h2>Speed and error</h2>", _table(["prompt", "exact, s", f"{label}, s", "PSNR, dB", "SSIM"], rows)]
    if report.layer_errors:
        steps = max(len(layer.by_step) for layer in report.layer_errors)
        errors = np.array([[*layer.by_step, *[0.0] * (steps - len(layer.by_step))] for layer in report.layer_errors])
        parts += [
            "<h2>Error of each layer's attention</h2>",
            '<p class="note">Relative L1 error against exact attention in float32 on the same inputs, at '
            f"{report.layer_error_steps} denoising steps of the first prompt.</p>",
            _heat_map(
                [layer.layer for layer in report.layer_errors],
                [f"step {step}" for step in range(steps)],
                errors,
                [[""] * steps] * len(errors),
            ),
        ]
    header = ["layer", "asked", "ran", "kernels", "numerics", "calls", "why"]
    plan = [
        [row.layer, row.asked, row.recipe, row.kernels, row.numerics, str(row.calls), row.reason]
        for row in report.explanation.rows
    ]
    parts += ["<h2>Which kernel ran</h2>", _table(header, plan)]
    parts += ["<h2>Configuration</h2>", f"<pre>{escape(report.config.to_json())}</pre>"]
    return _page(f"{report.pipeline}: {label} and exact attention", parts, report.versions)


def calibration_page(calibration: Calibration, versions: Mapping[str, str]) -> str:
    """Return the page of a calibration: its errors, a heat map of layers and steps, and the configuration."""
    names = [[calibration.recipes[cell] for cell in row] for row in calibration.cells]
    shares = [[recipe, f"{share:.1%}"] for recipe, share in calibration.shares.items() if share]
    costs = "times of this GPU" if calibration.priced else f"the order {', '.join(calibration.recipes)}"
    errors = {f"prompt {place}": error for place, error in enumerate(calibration.errors, 1)}
    held_out_errors = {f"held-out prompt {place}": error for place, error in enumerate(calibration.held_out, 1)}
    first = calibration.recipes[0]
    parts = [
        "".join(f"<p>{escape(line)}</p>" for line in calibration.summary().splitlines()),
        "<h2>Error of the output</h2>",
        f'<p class="note">{escape(calibration.measure)}; the budget is {calibration.budget:g}.</p>',
        _bars({f"{first} alone, worst prompt": calibration.alone, **errors, **held_out_errors}, calibration.budget),
        "<h2>Recipe of each layer and step</h2>",
        f'<p class="note">Colours and numbers: the error of the output if only these layers and steps ran {first}, '
        f"predicted. Costs are by {escape(costs)}.</p>",
        _heat_map(calibration.layers, calibration.ranges, calibration.cell_errors, names),
        _table(["recipe", "share of layers × steps"], shares),
        "<h2>Configuration</h2>",
        f"<pre>{escape(calibration.config.to_json())}</pre>",
    ]
    return _page("Calibration", parts, versions)


def _page(title: str, parts: Iterable[str], versions: Mapping[str, str]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return _PAGE.substitute(title=escape(title), body="\n".join(parts), versions=escape(packages))


def _pair(folder: Path, video: VideoReport, label: str) -> str:
    """Return a figure with the exact and the low-bit rendering of a prompt, one above the other under a slider."""
    names = ("exact", label)
    if any(name not in video.files for name in names):
        return ""
    exact, low_bit = (_media(folder / video.files[name], kind) for name, kind in zip(names, ("", "after"), strict=True))
    quality = "" if video.psnr is None else f", {video.psnr:.1f} dB"
    return (
        f'<figure class="pair"><div class="stage">{exact}{low_bit}</div>'
        f'<input type="range" min="0" max="100" value="50" aria-label="{escape(f"{video.prompt}: exact or {label}")}">'
        f"<figcaption><span>exact</span><span>{escape(video.prompt)}</span>"
        f"<span>{escape(label + quality)}</span></figcaption></figure>"
    )


def _media(path: Path, css_class: str) -> str:
    kind = MEDIA_TYPES[path.suffix]
    source = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    if kind.startswith("video"):
        return f'<video class="{css_class}" src="{source}" autoplay loop muted playsinline></video>'
    return f'<img class="{css_class}" src="{source}" alt="">'


def _heat_map(rows: Sequence[str], columns: Sequence[str], values: np.ndarray, texts: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells are coloured by the logarithm of their values (rows, columns), with texts in them."""
    highest = float(values.max(initial=0.0))
    lines = ["<tr><th></th>" + "".join(f"<th>{escape(column)}</th>" for column in columns) + "</tr>"]
    for row, numbers, words in zip(rows, values, texts, strict=True):
        cells = []
        for number, word in zip(numbers, words, strict=True):
            strength = 1 + math.log10(number / highest) / DECADES if number > 0 else 0.0
            small = f"<small>{number:.4f}</small>" if word else f"{number:.4f}"
            cells.append(f'<td class="heat" style="--heat: {90 * max(0.0, strength):.0f}">{escape(word)}{small}</td>')
        lines.append(f"<tr><th>{escape(row)}</th>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _bars(values: Mapping[str, float], limit: float) -> str:
    """Return a bar for each value; those above the limit have another colour."""
    highest = max(*values.values(), 1e-12)
    lines = [
        f"<span>{escape(name)}</span>"
        f'<i style="width: {100 * value / highest:.1f}%"{" class=over" if value > limit else ""}></i>'
        f"<span>{value:.4f}</span>"
        for name, value in values.items()
    ]
    return f'<div class="bars">{"".join(lines)}</div>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
