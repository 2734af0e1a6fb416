"""The routes of ``test_routes`` in bf16, beside the same scripts with plain bfloat16 weights and float32 masters.

A tool's plain run in bf16 is autocast on float32 weights, which is other arithmetic. So the plain run here is the
tool's own in one process, without mixed precision, on bfloat16 weights, with the optimizer of ``routes/masters.py``:
torch's AdamW on float32 masters, on the sums of the ranks' gradients. Masters, weights and losses are equal in every
bit, with accumulation and clipping too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compat.test_routes import GRPO, SCRIPTS, TRAINER, TRL, Row, assert_same, end, run, run_deepspeed, start, weights

CLIP = 0.05


def losses(said: str) -> dict[int, list[float]]:
    """The losses that each rank printed."""
    return {
        int(rank): json.loads(each) for rank, each in re.findall(r"^losses of rank (\d+): (.*)$", said, re.MULTILINE)
    }


def assert_same_losses(ours: dict[int, list[float]], plain: list[float], ranks: int, backwards: int) -> None:
    """``plain``: of the micro batches of all ranks in turn."""
    assert sorted(ours) == list(range(ranks))
    for rank, found in ours.items():
        assert found[:backwards] == plain[: ranks * backwards][rank::ranks]


@dataclass(frozen=True)
class Bf16:
    ranks: int
    stage: int
    accumulation: int = 1
    clip: float = 0.0
    arguments: list[str] = field(default_factory=list)

    @property
    def by_hand(self) -> list[str]:
        steps = ["--gradient_accumulation_steps", str(self.ranks * self.accumulation)]
        as_on = ["--ranks", str(self.ranks), "--stage", str(self.stage), "--clip", str(self.clip)]
        return [*self.arguments, *steps, "--by_hand", "--bf16", "0", *as_on]

    @property
    def ours(self) -> list[str]:
        steps = ["--gradient_accumulation_steps", str(self.accumulation)]
        return [*self.arguments, *steps, "--bf16", "1", "--max_grad_norm", str(self.clip)]

    def file(self, folder: Path) -> str:
        file = folder / "ds.json"
        file.write_text(json.dumps(Row(self.ranks, self.stage).content()))
        return str(file)


LORA = ["--lora", "1"]
ROWS = {
    "1-stage1": Bf16(1, 1),
    "1-stage2": Bf16(1, 2),
    "1-stage3": Bf16(1, 3),
    "2-stage1": Bf16(2, 1),
    "2-stage2": Bf16(2, 2),
    "2-stage3": Bf16(2, 3),
    "1-stage2-accumulation-clipping": Bf16(1, 2, 2, CLIP),
    "1-stage3-accumulation-clipping": Bf16(1, 3, 2, CLIP),
    "2-stage1-accumulation-clipping": Bf16(2, 1, 2, CLIP),
    "2-stage2-accumulation-clipping": Bf16(2, 2, 2, CLIP),
    "2-stage3-accumulation-clipping": Bf16(2, 3, 2, CLIP),
    "1-stage2-lora": Bf16(1, 2, arguments=LORA),
    "2-stage3-lora-accumulation": Bf16(2, 3, 2, arguments=LORA),
}
SLOW = {"1-stage2-accumulation-clipping"}


def marked(name: str, row: Bf16) -> Any:
    return pytest.param(row, marks=pytest.mark.slow if name in SLOW else pytest.mark.full, id=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    run(str(SCRIPTS / "trainer.py"), *TRAINER, "--max_steps", "1", "--output_dir", str(folder))
    return str(folder)


def compare(tmp_path: Path, command: list[str], row: Bf16) -> tuple[str, str]:
    """Run both and compare masters and weights; what they said."""
    plain = start(*command, *row.by_hand, "--output_dir", str(tmp_path / "plain"))
    ours = [*command, *row.ours, "--output_dir", str(tmp_path / "ours"), "--deepspeed", row.file(tmp_path)]
    said = run_deepspeed(*ours, ranks=row.ranks)
    other = end(plain)
    found, expected = (torch.load(tmp_path / name / "masters.pt") for name in ("ours", "plain"))
    assert_same(found, expected)
    final, plainly = weights(tmp_path / "ours"), weights(tmp_path / "plain")
    assert_same(final, plainly)
    assert {each.dtype for each in final.values()} == {torch.bfloat16}
    assert any(not torch.equal(each, each.bfloat16().float()) for each in found.values()), "masters have more digits"
    return said, other


@pytest.mark.parametrize("row", [marked(name, row) for name, row in ROWS.items()])
def test_the_trainer(row: Bf16, tmp_path: Path, model: str) -> None:
    said, other = compare(tmp_path, [str(SCRIPTS / "trainer.py"), *TRAINER, "--model", model], row)
    assert_same_losses(losses(said), losses(other)[0], row.ranks, 4 * row.accumulation)


ACCELERATED = {
    "1-stage2": Bf16(1, 2),
    "2-stage1": Bf16(2, 1),
    "2-stage3": Bf16(2, 3),
    "1-stage1-accumulation-clipping": Bf16(1, 1, 2, CLIP),
    "1-stage3-accumulation-clipping": Bf16(1, 3, 2, CLIP),
    "2-stage1-accumulation-clipping": Bf16(2, 1, 2, CLIP),
    "2-stage2-accumulation-clipping": Bf16(2, 2, 2, CLIP),
    "2-stage3-accumulation-clipping": Bf16(2, 3, 2, CLIP),
}


@pytest.mark.full
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ACCELERATED.items()])
def test_accelerate(row: Bf16, tmp_path: Path) -> None:
    command = [str(SCRIPTS / "accelerated.py"), "--bf16", "--clip", str(row.clip or 1e6)]
    by_hand = ["--as-on", str(row.ranks), "--as-stage", str(row.stage)]
    steps = str(row.ranks * row.accumulation)
    plain = start(*command, *by_hand, "--accumulation", steps, "--out", str(tmp_path / "plain"))
    ours = [*command, "--deepspeed", str(row.stage), "--accumulation", str(row.accumulation)]
    said = run_deepspeed(*ours, "--out", str(tmp_path / "ours"), ranks=row.ranks)
    other = end(plain)
    assert_same(torch.load(tmp_path / "ours.masters"), torch.load(tmp_path / "plain.masters"))
    assert_same(torch.load(tmp_path / "ours"), torch.load(tmp_path / "plain"))
    assert_same_losses(losses(said), losses(other)[0], row.ranks, 32 // row.ranks)


TRL_ROWS = {
    "sft-1-stage2": Bf16(1, 2),
    "sft-2-stage3-accumulation-clipping": Bf16(2, 3, 2, CLIP),
    "sft-2-stage1-lora-accumulation": Bf16(2, 1, 2, arguments=["--lora"]),
    "dpo-1-stage2-accumulation-clipping": Bf16(1, 2, 2, CLIP),
    "dpo-2-stage3": Bf16(2, 3),
    "dpo-1-stage3-lora": Bf16(1, 3, arguments=["--lora"]),
    "grpo-1-stage2-clipping": Bf16(1, 2, clip=CLIP),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, row", [pytest.param(name.split("-")[0], row, id=name) for name, row in TRL_ROWS.items()]
)
def test_trl(kind: str, row: Bf16, tmp_path: Path) -> None:
    script, pretrained = str(SCRIPTS / "trl_trainers.py"), str(tmp_path / "model")
    run(script, "make", pretrained)
    compare(tmp_path, [script, kind, pretrained, *TRL, *(GRPO if kind == "grpo" else [])], row)
    before = load_file(tmp_path / "model" / "model.safetensors")
    for name, master in torch.load(tmp_path / "ours" / "masters.pt").items():
        started_from = before[name].bfloat16().float() if name in before else torch.zeros(())
        assert not torch.equal(master, started_from.expand_as(master)), name
