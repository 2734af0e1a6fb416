"""transformers' ``resize_token_embeddings`` at stage 3 before ``initialize()``, an engine that only evaluates, and one
that trains and is saved, by the calls that OpenRLHF makes. ``plain``: the same in torch, on the mean of the ranks'
gradients, from the same folder, which ``make`` writes.
"""

import copy
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

how, pretrained, out = sys.argv[1:]
SGD = {"lr": 0.1}
ZERO = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}, "stage3_max_live_parameters": "auto"}
FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 100,
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "compile": {"deepcompile": False},
    "tensor_parallel": {"autotp_size": 1},
    "zero_optimization": ZERO,
}
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LARGER = 52


def batch(step: int, of_rank: int) -> torch.Tensor:
    return torch.randint(3, LARGER, (2, 6), generator=torch.Generator().manual_seed(10 * step + of_rank))


def make(tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, max_position_embeddings=32, tie_word_embeddings=tied, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(pretrained)


def resized() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    # At stage 3 transformers resizes a head that is tied, too, and draws for it.
    for size, how_to in ((LARGER - 5, {}), (LARGER - 2, {"pad_to_multiple_of": 4, "mean_resizing": False})):
        torch.manual_seed(size)
        model.resize_token_embeddings(size, **how_to)
    assert model.get_input_embeddings().weight.shape == (LARGER, 16) and model.config.vocab_size == LARGER
    return model


if how == "make":
    make(tied=out == "tied")
elif how == "deepspeed":
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    train = {**FILE, "gradient_clipping": 0.0, "zero_optimization": {**ZERO, "offload_optimizer": {"device": "cpu"}}}
    kept = HfDeepSpeedConfig(train)
    model = resized()
    reference, nothing, *_ = deepspeed.initialize(
        model=copy.deepcopy(model), args={"local_rank": rank}, config=FILE, dist_init_required=True
    )
    assert nothing is None
    reference.eval()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=train, dist_init_required=True)
    for step in range(3):
        ids = batch(step, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    with torch.no_grad():
        logits = reference(input_ids=batch(9, 0)).logits
    state = engine._consolidated_16bit_state_dict()
    if rank == 0:
        assert set(engine.module.state_dict()) <= set(state)
        engine.module.save_pretrained(out, state_dict=state)
        save_file({"logits": logits}, f"{out}/logits.safetensors")
    torch.distributed.barrier()
    reference.destroy()
    engine.destroy()
elif rank == 0:
    model = resized()
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=batch(9, 0)).logits
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(3):
        gradients = []
        for each in range(world_size):
            optimizer.zero_grad()
            ids = batch(step, each)
            model(input_ids=ids, labels=ids).loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, *each in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(each) / world_size
        optimizer.step()
    model.save_pretrained(out)
    save_file({"logits": logits}, f"{out}/logits.safetensors")
