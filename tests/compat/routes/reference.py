"""A reference model for evaluation, as an engine without an optimizer, and then training of the same model."""

import sys

import deepspeed
import pytest
import torch

stage = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
batch = torch.randn(4, 16)
expected = model(batch).detach()
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}

# TRL writes such keys, which DeepSpeed does not read.
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model, config={**config, "zero_optimization.reduce_bucket_size": 1024}
)
assert optimizer is None and scheduler is None and isinstance(engine, deepspeed.DeepSpeedEngine)
assert engine.config.get("zero_optimization", {}).get("stage") == stage and "optimizer" not in engine.config
if stage == 3:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    sharded = torch.distributed.get_world_size() > 1
    outside = ZeroParamStatus.NOT_AVAILABLE if sharded else ZeroParamStatus.AVAILABLE
    assert {each.ds_status for each in engine.module.parameters()} == {outside}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        assert {each.ds_status for each in engine.module.parameters()} == {ZeroParamStatus.AVAILABLE}
engine.eval()
with torch.no_grad():
    assert torch.equal(engine(batch), expected)
with pytest.raises(RuntimeError, match="without an optimizer"):
    engine.backward(engine(batch).sum())
with pytest.raises(RuntimeError, match="without an optimizer"):
    engine.step()
engine.destroy()

adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config={**config, "gradient_clipping": 0})
engine.backward(engine(batch).sum())
engine.step()
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    changed = model(batch)
assert not torch.equal(changed, expected) and torch.isfinite(changed).all()
print("as expected")
