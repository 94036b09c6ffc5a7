"""Train a small Llama whose sequences begin with a BOS token, until its heads put their weight on BOS.

    python examples/train_tiny_llama.py --steps 3000

The text is the Python standard library as bytes; byte 255, which UTF-8 never uses, is the BOS token. The model is small
enough to be kept in this repository, and to be trained on a CPU in minutes; a GPU trains it longer. Like large language
models, and unlike random tensors, it has attention sinks. At every point of the curve the command writes the weights in
bfloat16, and training.json with the share of every head's weight that BOS holds, to the folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from source_text import VOCABULARY, Text, held_out_windows, read_text, standard_library, training_windows
from torch import Tensor
from tqdm.auto import tqdm
from training_report import finite
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from sage_hf.bench.results import facts

BOS = 255
DEFAULT_FOLDER = Path(__file__).parent / "tiny_llama"


def build_model(seq_len: int, seed: int = 0) -> LlamaForCausalLM:
    """Build the model with random weights: 6 layers of 4 query heads and 1 key head, head_dim 64, 0.7 M weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=96,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=seq_len,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=BOS,
            eos_token_id=None,
        )
    )


def with_bos(windows: Tensor) -> Tensor:
    """Return tokens (count, length + 1) that begin with BOS; windows uint8 (count, length)."""
    windows = windows.long()
    return torch.cat((torch.full_like(windows[:, :1], BOS), windows), 1)


def loss_of(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the mean loss in nats per byte over windows of text, uint8 (count, length), each after BOS."""
    tokens = with_bos(windows)
    return model(tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss


@torch.no_grad()
def bos_mass(model: LlamaForCausalLM, windows: Tensor) -> list[list[float]]:
    """Return the mean weight that queries after the first 16 give to BOS, for every layer and head."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        weights = model(with_bos(windows), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(attention)
    return [layer[:, :, 16:, 0].float().mean((0, 2)).tolist() for layer in weights]


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor, batch_size: int) -> float:
    """Return `loss_of` many windows, computed in batches."""
    losses = [loss_of(model, batch) * len(batch) for batch in windows.split(batch_size)]
    return float(torch.stack(losses).sum() / len(windows))


def save(model: LlamaForCausalLM, text: Text, curve: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the weights, in bfloat16, and training.json."""
    copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(args.folder)
    settings = {name: getattr(args, name) for name in ("steps", "lr", "batch_size", "seq_len", "seed", "bfloat16")}
    report = {"settings": settings, "text": text.facts, "curve": curve, "facts": facts(torch.device(args.device))}
    (args.folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def train(model: LlamaForCausalLM, text: Text, args: argparse.Namespace) -> None:
    """Train in place by AdamW without weight decay, cosine schedule; save at every point of the curve.

    Weight decay is 0, because decay keeps the norms of queries and keys, and so the sinks, small.
    """
    device = torch.device(args.device)
    model.to(device)
    training = text.training.to(device)
    held_out = held_out_windows(text.held_out, args.seq_len, 32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, args.steps // 20), args.steps)
    curve, losses, started = [], [], time.perf_counter()
    with tqdm(total=args.steps, desc="train", mininterval=10.0) as bar:
        for step in range(1, args.steps + 1):
            windows = training_windows(training, args.seq_len, args.batch_size, args.seed * 1_000_003 + step)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bfloat16):
                loss = loss_of(model, windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            bar.update()
            if step % max(1, args.steps // args.points) == 0 or step == args.steps:
                mass = bos_mass(model, held_out[:4])
                row = {
                    "step": step,
                    "train_loss": finite(torch.stack(losses).mean().item()),
                    "held_out_loss": finite(held_out_loss(model, held_out, args.batch_size)),
                    "seconds": round(time.perf_counter() - started),
                    "bos_mass": [[round(head, 3) for head in layer] for layer in mass],
                }
                curve.append(row)
                losses = []
                save(model, text, curve, args)
                bar.write(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=511, help="bytes of text after BOS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, default=20, help="of the curve")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 where autocast does")
    parser.add_argument("--text", type=Path, help="folder of Python files; default: the standard library")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    args = parser.parse_args()
    text = read_text(args.text or standard_library(), "the Python standard library")
    model = build_model(args.seq_len + 1, args.seed)
    print(f"{model.num_parameters() / 1e6:.2f} M weights, {args.steps * args.batch_size * args.seq_len / 1e6:.1f} MB")
    train(model, text, args)


if __name__ == "__main__":
    main()
