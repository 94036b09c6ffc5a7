"""Three steps of each trainer that installs on a CPU, with gradients by `sage_bwd`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.audit

MODEL = """
import logging, torch, sage_hf
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from tests.helpers.tiny_transformers import MODELS

def build(implementation="sage_bwd"):
    return MODELS["llama"].build(implementation).train()

tokens = MODELS["llama"].inputs()["input_ids"]
rows = [{"input_ids": row, "labels": row} for row in tokens.repeat(3, 1)]
options = dict(per_device_train_batch_size=2, max_steps=3, report_to=[], save_strategy="no", use_cpu=True)
options |= dict(output_dir=OUTPUT, logging_steps=1, learning_rate=1e-2)

def check(model, before, losses):
    ran = {row.recipe for row in sage_hf.explain(model).rows}
    assert ran == {"sage_bwd"}, ran
    assert len(losses) == 3 and losses[-1] < losses[0], losses
    assert any(not torch.equal(x, y) for x, y in zip(before, model.parameters()))

def copies(model):
    return [x.detach().clone() for x in model.parameters()]

def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""
TRAINERS = {
    "transformers": (
        (),
        """
model = build()
before = copies(model)
trainer = Trainer(model, TrainingArguments(**options), train_dataset=rows)
trainer.train()
check(model, before, losses_of(trainer))
""",
    ),
    "peft": (
        (),
        """
from peft import LoraConfig, get_peft_model
model = get_peft_model(build(), LoraConfig(target_modules=["q_proj", "k_proj"]))
before = copies(model)
trainer = Trainer(model, TrainingArguments(**options), train_dataset=rows)
trainer.train()
check(model, before, losses_of(trainer))
""",
    ),
    "accelerate": (
        (),
        """
from accelerate import Accelerator
accelerator, model = Accelerator(cpu=True), build()
before = copies(model)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
losses = []
for _ in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
check(model, before, losses)
""",
    ),
    "trl": (
        ("trl==1.16.0", "datasets", "pyarrow", "dill", "xxhash", "multiprocess", "pandas"),
        """
import pyarrow
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
vocabulary = {f"<{i}>": i for i in range(97)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<3>")), pad_token="<0>", eos_token="<2>", unk_token="<3>"
)
model = build()
before = copies(model)
table = pyarrow.Table.from_pylist([{"input_ids": row["input_ids"].tolist()} for row in rows])
data = Dataset(table, fingerprint="rows")
config = SFTConfig(**options, bf16=False, dataset_kwargs={"skip_prepare_dataset": True})
trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
trainer.train()
check(model, before, losses_of(trainer))
""",
    ),
    "axolotl": (
        ("axolotl==0.19.0",),
        """
sage_hf.drop_in()
from axolotl.monkeypatch.attention import register_sage_attn
register_sage_attn()
model = build("sage")
before = copies(model)
trainer = Trainer(model, TrainingArguments(**options), train_dataset=rows)
trainer.train()
losses = losses_of(trainer)
assert losses[-1] < losses[0] and any(not torch.equal(x, y) for x, y in zip(before, model.parameters()))
assert {outcome.recipe for outcome in sage_hf.record.outcomes_outside_layers()} == {"sage_bwd"}
""",
    ),
    "simpletuner": (
        ("simpletuner==3.1.6",),
        """
from types import SimpleNamespace
sage_hf.drop_in()
from simpletuner.helpers.training import attention_backend
from tests.helpers.families import family
# Its own words for a model that trains; it puts the function in place of PyTorch's attention.
config = SimpleNamespace(attention_mechanism="sageattention", sageattention_usage="training")
attention_backend.AttentionBackendController.apply(config, attention_backend.AttentionPhase.TRAIN)
q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 80, 64))
optimizer, losses = torch.optim.SGD([q, k, v], 1.0), []
for _ in range(3):
    loss = torch.nn.functional.scaled_dot_product_attention(q, k, v).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[0]
assert {outcome.recipe for outcome in sage_hf.record.outcomes_outside_layers()} == {"sage_bwd"}
""",
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_three_steps_run_in_few_bits(name: str, tmp_path: Path) -> None:
    requirements, code = TRAINERS[name]
    packages = tmp_path / "packages"
    if requirements:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, *requirements]
        subprocess.run(command, check=True)
    environment = {**os.environ, "SAGE_KERNELS_ROUTING": "0", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(packages), os.getcwd()])
    code = f"OUTPUT = {str(tmp_path / 'output')!r}\n{MODEL}{code}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[:2500] + result.stderr[-2500:]
