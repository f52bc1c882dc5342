"""The actor against transformers and TorchRL's own loss, and under FSDP2."""

from __future__ import annotations

import multiprocessing
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict, lazy_stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.objectives.llm import GRPOLoss
from torchtune.models.qwen2 import qwen2

from torchrl_llm_async.modules import TorchtuneActor, add_value_head
from torchrl_llm_async.objectives import DecoupledPPOLoss, OnlineDPOLoss
from torchrl_llm_async.packing import blank_rows, pack_rows, pad_rows

SHAPE = {
    "vocab_size": 23,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 16,
    "intermediate_dim": 24,
    "max_seq_len": 32,
}


def make_decoder(seed: int = 0, *, tied: bool = True, **changes) -> nn.Module:
    torch.manual_seed(seed)
    decoder = qwen2(**{**SHAPE, **changes}, tie_word_embeddings=tied)
    for parameter in decoder.parameters():
        # torchtune's biases start at 0 and its norms at 1, which would hide mistakes.
        nn.init.normal_(parameter, std=0.3)
    return decoder


def make_rows(seed: int = 0, lengths=(4, 9, 6, 6)):
    """Ragged rows in pairs, with everything any of the losses reads."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        sampled = torch.arange(length) >= 2
        noise = partial(torch.randn, length, generator=generator)
        rows.append(
            TensorDict(
                {
                    "tokens": {"full": torch.randint(1, 23, (length,), generator=generator)},
                    "masks": {
                        "all_attention_mask": torch.ones(length, dtype=torch.bool),
                        "all_assistant_mask": sampled,
                    },
                    "log_probs": {
                        "full": torch.where(sampled, -3.0 + 0.2 * noise(), 0.0),
                        "ref": torch.where(sampled, -3.0 + 0.2 * noise(), 0.0),
                    },
                    "advantage": torch.randn(1, generator=generator),
                    "next": {"reward": torch.tensor([float(index % 2 == 0)])},
                    "group": {"id": torch.tensor(index // 2)},
                }
            )
        )
    return lazy_stack(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_equal_transformers(tied):
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
    from transformers import Qwen2Config, Qwen2ForCausalLM

    decoder = make_decoder(tied=tied, norm_eps=1e-5, rope_base=1e4)
    config = Qwen2Config(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["embed_dim"],
        intermediate_size=SHAPE["intermediate_dim"],
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_heads"],
        num_key_value_heads=SHAPE["num_kv_heads"],
        max_position_embeddings=SHAPE["max_seq_len"],
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    state = qwen2_tune_to_hf(
        decoder.state_dict(), num_heads=4, num_kv_heads=2, dim=16, tie_word_embeddings=tied
    )
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}

    rows = make_rows()
    micro = pad_rows(rows, pad_id=0)
    actor = TorchtuneActor(decoder, temperature=0.7)
    with torch.no_grad():
        log_probs, entropy, _ = actor.score(micro, entropy="detached")
        for i, row in enumerate(rows.unbind(0)):
            tokens = row["tokens", "full"]
            expected = (model(tokens[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            chosen = expected.gather(-1, tokens[1:, None])[:, 0]
            start = 1 - len(tokens)
            torch.testing.assert_close(log_probs[i, start:], chosen, atol=1e-5, rtol=0)
            torch.testing.assert_close(
                entropy[i, start:], -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0
            )
            assert log_probs[i, :start].eq(0).all() and entropy[i, :start].eq(0).all()


class WholeLogits(nn.Module):
    """A decoder of torchtune's call convention without its ``unembed``."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens, *, mask, input_pos):
        return self.decoder(tokens, mask=mask, input_pos=input_pos)


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_masks_padding_and_path_change_nothing(tied):
    """Values and gradients are the same however the log-probs are computed."""
    rows = make_rows()
    dense = pad_rows(rows, pad_id=0)
    mask = dense["masks", "all_assistant_mask"]
    results = []
    for micro, chunk_size, wrap, masked in (
        (dense, 1024, False, False),
        (dense, 3, False, True),
        (dense, 3, True, True),
        (rows, 1, True, False),
    ):
        decoder = make_decoder(tied=tied)
        actor = TorchtuneActor(WholeLogits(decoder) if wrap else decoder, chunk_size=chunk_size)
        log_probs, entropy, _ = actor.score(
            micro, mask=mask if masked else None, entropy="differentiable"
        )
        assert log_probs.dtype == torch.float32
        if masked:
            assert log_probs[~mask].eq(0).all() and log_probs[mask].lt(0).all()
        loss = (log_probs + entropy.square())[mask].sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)


def with_gaps(rows) -> TensorDict:
    """The rows with padding between all tokens, as well as before and after them."""
    dense = pad_rows(rows, pad_id=0)
    place = torch.arange(9) * 2 + 1
    out = TensorDict(batch_size=dense.batch_size)
    for key, value in dense.items(include_nested=True, leaves_only=True):
        if value.shape == (4, 9):
            out[key] = value.new_zeros(4, 20).index_copy(1, place, value)
    return out


@pytest.mark.parametrize("row_tokens", [None, 13, 32])
def test_packed_rows_score_like_padded_ones(row_tokens):
    """Log-probs, entropies, values and the gradients of all three, of each sequence alone."""
    rows = make_rows()
    results = []
    for micro in (pad_rows(rows, 0), pack_rows(rows, 0, row_tokens=row_tokens)):
        decoder = add_value_head(make_decoder())
        torch.manual_seed(1)
        nn.init.normal_(decoder.value_head.weight)
        mask = micro["masks", "all_assistant_mask"]
        scores = TorchtuneActor(decoder).score(
            micro, mask=mask, entropy="differentiable", values=True
        )
        rows_of_their_own = torch.arange(len(mask))[:, None].expand_as(mask)
        ids = micro.get(("packing", "segment_ids"), rows_of_their_own)
        order = ids[mask].argsort(stable=True)
        flat = [score[mask][order] for score in scores]
        sum(value.square().sum() for value in flat).backward()
        assert all((score[~mask] == 0).all() and (score[mask] != 0).all() for score in scores)
        results.append([*flat, *(parameter.grad for parameter in decoder.parameters())])
    assert len(results[0][0]) == 2 + 7 + 4 + 4
    for packed, padded in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


def test_padding_may_be_anywhere_but_a_token_behind_it_is_not_scored():
    actor, rows = TorchtuneActor(make_decoder()), make_rows()
    dense, gaps = pad_rows(rows, 0), with_gaps(rows)
    assert (actor.score(gaps).log_probs == 0).all()
    wanted = actor._call_model(*actor._read(dense))[dense["masks", "all_attention_mask"]]
    found = actor._call_model(*actor._read(gaps))[gaps["masks", "all_attention_mask"]]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_values_are_of_the_state_before_the_token():
    """They change with what stands before it, not with the token itself."""
    decoder = add_value_head(make_decoder())
    nn.init.normal_(decoder.value_head.weight)
    actor, micro = TorchtuneActor(decoder), pad_rows(make_rows(), 0)
    before = actor.score(micro, values=True).values
    changed = micro.clone()
    changed["tokens", "full"][:, 6] += 1
    after = actor.score(changed, values=True).values
    assert (before[:, :7] == after[:, :7]).all()
    assert (before[:, 7:] != after[:, 7:]).all()


def test_values_need_a_head_and_hidden_states():
    micro = pad_rows(make_rows(), 0)
    with pytest.raises(ValueError, match=r"add_value_head\(model\) before sharding"):
        TorchtuneActor(make_decoder()).score(micro, values=True)
    wrapped = WholeLogits(make_decoder())
    wrapped.value_head = nn.Linear(16, 1)
    with pytest.raises(ValueError, match="hidden states"):
        TorchtuneActor(wrapped).score(micro, values=True)


class LargestVocabulary(TorchDispatchMode):
    """Records the most rows of any tensor whose last dimension is the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = vocab_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (self.vocab_size,):
                self.rows = max(self.rows, value.numel() // self.vocab_size)
        return out


def test_no_tensor_of_tokens_by_vocabulary():
    micro = pad_rows(make_rows(lengths=(30, 30, 30, 30)), pad_id=0)
    decoder = make_decoder(vocab_size=101)
    loss = DecoupledPPOLoss(TorchtuneActor(decoder, chunk_size=20), entropy_coeff=0.1)
    with LargestVocabulary(101) as seen:
        loss(loss.anchor(micro), normalizer=1.0).total().backward()
    assert 0 < seen.rows <= 20 < 4 * 28


def test_a_blank_micro_batch_reaches_every_parameter():
    blank = blank_rows(make_rows(), pad_id=0)
    for loss_class in (DecoupledPPOLoss, OnlineDPOLoss):
        for wrap in (False, True):
            decoder = make_decoder()
            actor = TorchtuneActor(WholeLogits(decoder) if wrap else decoder)
            total = loss_class(actor)(blank, normalizer=3.0).total()
            total.backward()
            assert total.item() == 0.0
            assert all(p.grad is not None and p.grad.eq(0).all() for p in decoder.parameters())


@pytest.mark.parametrize("masking_strategy", ["sft", "rlhf"])
@pytest.mark.parametrize("ragged", [True, False])
def test_grpo_loss_of_torchrl(masking_strategy, ragged):
    """TorchRL's loss runs on the actor; on equal terms it equals coupled PPO."""
    rows = make_rows()
    data = rows if ragged else pad_rows(rows, pad_id=0)
    theirs, ours = make_decoder(), make_decoder()
    grpo = GRPOLoss(
        TorchtuneActor(theirs, temperature=0.8),
        clip_epsilon=(0.2, 0.3),
        entropy_bonus=False,
        masking_strategy=masking_strategy,
    )
    # GRPOLoss wants a feature dimension after that of the tokens: [N, 1, 1].
    grpo.set_keys(advantage="their_advantage")
    data.set("their_advantage", data["advantage"].unsqueeze(-1))
    expected = grpo(data).loss_objective
    expected.backward()
    loss = DecoupledPPOLoss(
        TorchtuneActor(ours, temperature=0.8), prox="behavior", clip_epsilon=(0.2, 0.3)
    )
    output = loss(data, normalizer=loss.denominator(data))
    output.total().backward()
    torch.testing.assert_close(output.total(), expected, atol=1e-6, rtol=1e-5)
    for value, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value.grad, reference.grad, atol=1e-6, rtol=1e-4)

    mask = pad_rows(rows, pad_id=0)["masks", "all_assistant_mask"]
    tokens = pad_rows(rows, pad_id=0)["tokens", "full"]
    with torch.no_grad():
        actor = grpo.actor_network
        log_probs, entropy, _ = actor.score(data, mask=mask, entropy="detached")
        torch.testing.assert_close(actor._get_rlhf_dist(data).log_prob(tokens), log_probs)
        distribution = actor.get_dist(data, mask_key=("masks", "all_assistant_mask"))
        torch.testing.assert_close(distribution.entropy()[mask], entropy[mask])
        everything = actor.score(data).log_probs
        generic = actor._get_generic_dist(data).log_prob(tokens)
        assert torch.allclose(generic[everything != 0], everything[everything != 0])


def test_forward_writes_log_probs_in_the_shape_of_its_rows():
    rows = make_rows()
    actor = TorchtuneActor(make_decoder(), log_probs_key=("log_probs", "mine"))
    assert actor.in_keys == [("tokens", "full"), ("masks", "all_attention_mask")]
    with torch.no_grad():
        dense = actor(pad_rows(rows, pad_id=0))["log_probs", "mine"]
        ragged = actor(rows)
    for i, row in enumerate(ragged.unbind(0)):
        value = row["log_probs", "mine"]
        torch.testing.assert_close(value, dense[i, -len(value) :])
        assert value.shape == row["tokens", "full"].shape
    assert ("log_probs", "mine") not in rows[0].keys(True)


def test_nested_keys_and_bad_input():
    micro = pad_rows(make_rows(), pad_id=0)
    moved = micro.empty()
    moved["a", "b", "tokens"] = micro["tokens", "full"]
    moved["a", "b", "mask"] = micro["masks", "all_attention_mask"]
    actor = TorchtuneActor(
        make_decoder(), tokens_key=("a", "b", "tokens"), attention_mask_key=("a", "b", "mask")
    )
    plain = TorchtuneActor(actor.model)
    torch.testing.assert_close(actor.score(moved).log_probs, plain.score(micro).log_probs)
    with pytest.raises(KeyError, match="attention_mask_key="):
        plain.score(moved)
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        TorchtuneActor(actor.model, temperature=0.0)
    assert "unembed" not in vars(actor.model)


def train_sharded(rank: int, world_size: int, store: str, results) -> None:
    """One optimizer step of each loss on ``world_size`` ranks, the last of them blank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world_size,))
    rows = make_rows()
    parts = [rows[:2], rows[2:]] if rank == 0 else [None, None]
    micros = [blank_rows(rows, 0) if part is None else pad_rows(part, 0) for part in parts]
    for name, make in LOSSES.items():
        decoder = make_decoder(tied=name == "ppo")
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        if name == "dpo":
            # An output projection of its own is scored outside: the ranks differ in chunks.
            fully_shard(decoder.output, mesh=mesh)
        fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
        loss = make(TorchtuneActor(decoder, chunk_size=4))
        count = sum(loss.denominator(m) for m in micros)
        dist.all_reduce(count)
        for _ in range(2):
            anchored = [loss.anchor(micro) for micro in micros]
            for micro in anchored:
                (loss(micro, normalizer=count).total() * world_size).backward()
            with torch.no_grad():  # Must not leave weights behind that miss the update.
                loss.actor_network.score(micros[0])
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            log_probs = loss.actor_network.score(pad_rows(rows, 0)).log_probs
        if rank == 0:
            results[name] = log_probs
    dist.destroy_process_group()


LOSSES = {"ppo": DecoupledPPOLoss, "dpo": OnlineDPOLoss}


def test_fsdp2_ranks_equal_one_process(tmp_path):
    """Two ranks, one of them without a valid row, train like one process with all rows."""
    # Both ranks are forked off one process that has done the imports.
    multiprocessing.set_forkserver_preload(["torchrl_llm_async.modules", "torchtune.models.qwen2"])
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.start_processes(
            train_sharded,
            (2, str(tmp_path / "store"), results),
            nprocs=2,
            start_method="forkserver",
        )
        sharded = dict(results)
    micro = pad_rows(make_rows(), 0)
    for name, make in LOSSES.items():
        decoder = make_decoder(tied=name == "ppo")
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
        loss = make(TorchtuneActor(decoder))
        count = loss.denominator(micro)
        for _ in range(2):
            loss(loss.anchor(micro), normalizer=count).total().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            expected = loss.actor_network.score(micro).log_probs
        torch.testing.assert_close(sharded[name], expected, atol=1e-4, rtol=0)
