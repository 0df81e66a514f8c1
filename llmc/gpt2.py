"""GPT-2 with explicit forward and backward, over the arenas of a memory plan.

The math below reads and writes named views. Whether the ln1 of layer 3 has storage of its own or shares it with every
other layer is the plan's business: forward runs every stage, backward runs the plan's schedule, and a schedule that
keeps less simply contains more stages.
"""

from math import sqrt
from types import SimpleNamespace

import numpy as np
import torch

from llmc.backend import copy_in
from llmc.data.order import token_order
from llmc.distributed.sharing import OneRank
from llmc.layers.adamw import TensorState, piece_noise, pieces_of, read_master, write_master
from llmc.layers.linear import linear_layers
from llmc.layers.residual import residual_add_inplace
from llmc.layers.rows import add_widened
from llmc.memory.arena import TORCH_DTYPE, allocate, allocate_mapped, cut_activations, cut_layer, cut_outer, cut_parameters
from llmc.memory.ladder import passes
from llmc.memory.layout import flat_layout, gradient_buckets
from llmc.memory.offload import OffloadedResiduals, ResidentResiduals
from llmc.memory.plan import Plan
from llmc.memory.scratch_sizes import classifier_rows, head_sums
from llmc.memory.slots import layer_slot
from llmc.memory.tables import BLOCK_ACTIVATIONS, FORWARD_STAGES, PARAMETERS
from llmc.memory.tuning import HEAD_GROUP, TUNING
from llmc.operations import operations
from llmc.rand import XorShift

ROUNDING_STATE = 13371337  # llm.c's, which adds the rank to it
ENCODER_SEEDS = 0x9E3779B9  # step from one rank's seed to the next, as each rank rounds gradients of its own
INIT_SEED = 42
INIT_PIECE = 1 << 20  # elements drawn at a time; a multiple of 16


OUTER = {p.name for p in PARAMETERS if not p.per_layer}


class GPT2:
    """A model, its gradients, optimizer state and activations, allocated once from a plan.

    Public views: params, grads (name -> tensor, file order); acts (name -> tensor of the activation arena), and scratch, those of acts
    that operations work in; and the flat arenas flat["parameters"], flat["gradients"], flat["m"], flat["v"], and of a bf16 model
    flat["master"] (fp32) or flat["master_bits"] (int16) where the plan has one, each (num_parameters,).
    Where nothing is trained there are only parameters, and no grads.
    An arena that is sharded over several ranks holds this rank's shares; its params or grads are the tensors that belong to no layer.

    sharing  this rank's Sharing; None if there is only one rank
    graphs   the Graphs that run steps, updates and evaluations; None runs them directly
    seed     0 to 65535, of initial weights and rounding; 0 has llm.c's
    """

    def __init__(self, plan: Plan, device="cpu", sharing=None, graphs=None, seed=0):
        o = plan.options
        self.plan, self.config, self.device = plan, o.config, torch.device(device)
        self.B, self.T, self.NH, self.C = o.B, o.T, o.heads, o.config.channels
        self.tuning = TUNING[o.device]
        self.gradient_buckets = gradient_buckets(o.config) if o.trains else {}
        self.run = graphs.run if graphs else run_at_once
        self.seed = seed
        # seeds every stochastic rounding; the same on all ranks, which must agree on the weights
        self.rng = XorShift(ROUNDING_STATE + (seed << 32))
        self.rng_state_last_update = self.rng.state
        self.flat = {
            arena: (allocate_mapped if plan.on_host(arena) else allocate)(plan.arenas[arena], self.device).view(TORCH_DTYPE[dtype])
            for arena, dtype in plan.flat_types.items()
        }
        self.acts = cut_activations(allocate(plan.arenas["activations"], self.device), plan)
        self.scratch = {name: view for name, view in self.acts.items() if plan.tensors[name].is_scratch}
        self.ops = operations(o.kernels, o.matmul, o.attention, self.scratch.get("matmul_workspace"))
        self.linear, self.fcproj_linear, self.head_linear = linear_layers(self.ops, o.matmul, self.scratch)
        self.params, self._layer_weights = self._views("parameters", "weights")
        self.grads, self._layer_gradients = self._views("gradients", "gradients") if o.trains else ({}, None)
        self.sharing = sharing or OneRank()
        self.division = self.sharing.division
        self.division.attach(self)
        self.sharing.attach(self)
        self.layout = self.layout_of("m")  # of the elements that this rank updates
        self.residuals = OffloadedResiduals(plan, self.acts["residual3"]) if o.offload_residual else ResidentResiduals()
        self.blocks = [self._block(l) for l in range(o.config.num_layers)]
        # each block's last stage also computes, in the same pass, the layernorm that follows: the next block's ln1, or the last layernorm
        first_pass, *forward_passes, last_pass = passes(FORWARD_STAGES, o.gelu_fusion)
        assert (first_pass, last_pass) == ("ln1_forward", "fcproj")
        # the stage qkv is the method _qkv, and so on. Functions, as bound methods would refer back to the model of one rank, whose memory
        # would then stay until the collector looks for cycles
        self.forward_passes = [getattr(GPT2, f"_{name}") for name in forward_passes]
        self.backward_passes = [getattr(GPT2, f"_{name}") for name in passes(plan.schedule, o.gelu_fusion)]
        self.final = self._final_norm()
        self.accumulate = False  # whether this micro-step's gradients are added to what there is, or written; _backward says

    def _views(self, arena, name):
        """(name -> view of the tensors, None); where the arena holds only shares, (name -> view of the tensors that belong to no layer,
        [name -> view of one layer's tensors, for each layer slot])."""
        o = self.plan.options
        if o.ranks_of(arena) == 1:
            return cut_parameters(self.flat[arena], self.config, o.tensor_parallel), None
        slots = [cut_layer(slot, self.config, o.tensor_parallel) for slot in self.acts[f"layer_{name}"]]
        with_lnf = self.gradient_buckets["lnf"] if arena == "gradients" else ()
        also = [tensor for tensor, _ in with_lnf if tensor not in OUTER]  # of one layer
        return cut_outer(self.acts[f"outer_{name}"], self.config, o.tensor_parallel, also), slots

    def weight(self, name, l):
        """Layer l of a weight tensor, in the place where it is read; l is 0 for a tensor that belongs to no layer."""
        if name in OUTER:
            return self.params[name]
        return self.params[name][l] if self._layer_weights is None else self._layer_weights[layer_slot(l)][name]

    def gradient(self, bucket, name, l):
        """Layer l of a weight tensor's gradient, in the place where it is written as one of a bucket (see gradient_buckets)."""
        if name in OUTER:
            return self.grads[name]
        if self._layer_gradients is None:
            return self.grads[name][l]
        return self.grads[name] if bucket == "lnf" else self._layer_gradients[layer_slot(bucket)][name]

    def _block(self, l):
        """Layer l's activations, parameters and gradients under their table names; a gradient's name has a leading d."""
        acts, block = self.acts, SimpleNamespace(number=l)
        for name in (a.name for a in BLOCK_ACTIVATIONS if a.name in acts and a.name != "residual3"):
            setattr(block, name, acts[name][l] if self.plan.tensors[name].purpose == "kept" else acts[name])
        block.all_rows = {}  # name -> the rows of all parts of ln1 and ln2, where these are kept
        if self.plan.options.keeps_all_rows:
            block.all_rows = {name: getattr(block, name) for name in ("ln1", "ln2")}
            for name, rows in block.all_rows.items():
                setattr(block, name, self.division.own_rows(rows))
        block.residual = acts["encoded"] if l == 0 else self._residual3(l - 1)
        block.residual3 = self._residual3(l)
        for p in PARAMETERS:
            if p.per_layer:
                setattr(block, p.name, self.weight(p.name, l))
        block.dproj_bias = None  # the gradient of the bias of the projection whose output is this block's input
        for name, of in self.gradient_buckets.get(l, ()):
            setattr(block, "d" + name if of == l else "dproj_bias", self.gradient(l, name, of))
        return block

    def _final_norm(self):
        """The last layernorm, as the ln1 of a block above the last. The gradient of its output overwrites that output."""
        acts, L = self.acts, self.config.num_layers
        gradients = (self.gradient("lnf", *of) for of in self.gradient_buckets.get("lnf", ()))
        return SimpleNamespace(
            residual=self._residual3(L - 1), ln1=acts["lnf"], ln1_mean=acts["lnf_mean"], ln1_rstd=acts["lnf_rstd"],
            ln1w=self.params["lnfw"], ln1b=self.params["lnfb"], **dict(zip(("dln1w", "dln1b", "dproj_bias"), gradients)), number=None,
        )  # fmt: skip

    # ------------------------------------------------------------------------
    # weights

    def init_random(self):
        """llm.c's initialisation: N(0, 0.02), for projections into the residual stream over sqrt(2 L), drawn from torch's generator in the
        order of llm.c: wte, wpe, then the matrices layer by layer."""
        generator = torch.Generator().manual_seed(INIT_SEED + self.seed)
        std = {"normal": 0.02, "residual": 0.02 / sqrt(2 * self.config.num_layers)}

        held = {t.name: t for t in self.layout_of("parameters")}

        def put(tensor, l, at, values):
            """Store the values of a whole layer's elements from `at` on, as far as they are held here."""
            at += tensor.file_start + l * tensor.file_elements
            for begin, in_file, n in tensor.runs_of(l):
                first, last = max(at, in_file), min(at + len(values), in_file + n)
                if first < last:
                    self.flat["parameters"][begin + first - in_file : begin + last - in_file].copy_(values[first - at : last - at])

        def draw(tensor, l, n):
            # in pieces, so that wte's draws need no 154 MB of their own; torch draws 16 normals at a time and treats a shorter
            # last group differently, so every piece is whole groups and the last piece also holds the tail
            cuts = [*range(0, max(1, n // 16 * 16 - INIT_PIECE), INIT_PIECE), n]
            for at, end in zip(cuts, cuts[1:]):
                self.sharing.moved()
                put(tensor, l, at, torch.empty(end - at).normal_(0.0, std[tensor.parameter.init], generator=generator))

        for tensor in held.values():
            if tensor.parameter.init == "ones":
                self.flat["parameters"][tensor.all_layers] = 1.0
        blocks = [t for t in held.values() if t.parameter.init in std and t.name not in OUTER]
        draw(held["wte"], 0, self.config.vocab_size * self.C)  # padded rows stay zero and are not drawn
        draw(held["wpe"], 0, held["wpe"].file_elements)
        for l in range(self.config.num_layers):
            for tensor in blocks:
                draw(tensor, l, tensor.file_elements)
        self.copy_weights_to_master()

    def layout_of(self, arena, shared=False):
        """Where the tensors lie in an arena: whole, or this rank's shares of them if the arena is sharded; if `shared`, always shares."""
        o = self.plan.options
        ranks = o.data_ranks if shared else o.ranks_of(arena)
        return flat_layout(self.config, ranks, self.sharing.rank % ranks, o.tensor_parallel, self.division.rank)

    def copy_weights_to_master(self):
        """Start (or restart) the fp32 master copy from the weights."""
        if "master" in self.flat:
            self.flat["master"].copy_(self.sharing.updated()["parameters"])
        if "master_bits" in self.flat:
            self.flat["master_bits"].zero_()  # a bf16 weight is an fp32 number whose lower half is zero

    # ------------------------------------------------------------------------
    # forward

    def _forward(self, for_backward=True):
        """Residuals that the plan moves to host memory go there only if a backward pass follows. The calls of need() and gathered(), here
        and in _backward, are repeated on paper by llmc/memory/traffic.py."""
        a, residuals = self.acts, self.residuals if for_backward else ResidentResiduals()
        self.sharing.need("outer", then=0)
        self.division.encode(self.ops, a["encoded"], a["inputs"], self.params["wte"], self.params["wpe"])
        self.sharing.need(0)
        self._ln1_forward(self.blocks[0])
        for block, above in zip(self.blocks, [*self.blocks[1:], self.final]):
            residuals.before_forward(block.number)
            self._block_forward(block, above)
            residuals.after_forward(block.number)

    def _block_forward(self, block, above):
        """Block l, whose ln1 has run already, and the ln1 of the block above; with above=None only as far as this block's output."""
        self.sharing.need(block.number, then=above and above.number)
        for forward in self.forward_passes:
            forward(self, block)
        if above and above.number is not None:
            self.sharing.need(above.number)  # its ln1 is computed in the pass of _fcproj
        self._fcproj(block, above)

    def _all_rows(self, block, name, again=False):
        """ln1 or ln2 with the rows of all parts, (B, T, C). Backward needs them `again`, and they may still be there."""
        if name not in block.all_rows:
            return (self.division.still_gathered if again else self.division.gathered)(getattr(block, name))
        if not again:
            self.division.gather_in_place(block.all_rows[name])
        return block.all_rows[name]

    def _summed_matmul(self, out, inp, weight, bias):
        """out (B, s, C) = inp @ weight.T + bias, summed over parts, each of which has some columns of inp and of the weight."""
        self.linear.forward(self.division.partial(out), inp, weight, self.division.bias(bias))
        self.division.sum_partial(out)

    def _residual3(self, l):
        return self.acts["residual3"][self.plan.residual_slot(l)]

    def _ln1_forward(self, block):
        self.ops.layernorm_forward(block.ln1, block.ln1_mean, block.ln1_rstd, block.residual, block.ln1w, block.ln1b, self.scratch)

    def _ln1(self, block):
        self.ops.layernorm_normalize(block.ln1, block.residual, block.ln1_mean, block.ln1_rstd, block.ln1w, block.ln1b, self.scratch)

    def _qkv(self, block):
        self.linear.forward(block.qkvr, self._all_rows(block, "ln1"), block.qkvw, block.qkvb)

    def _attention(self, block):
        self.ops.attention_forward(block.atty, block.lse, block.qkvr, self.NH, self.scratch)

    def _attproj_ln2(self, block):
        self._summed_matmul(block.residual2, block.atty, block.attprojw, block.attprojb)
        self.ops.residual_layernorm_forward(
            block.residual2, block.ln2, block.ln2_mean, block.ln2_rstd, block.residual, block.ln2w, block.ln2b, self.scratch
        )

    def _ln2(self, block):
        self.ops.layernorm_normalize(block.ln2, block.residual2, block.ln2_mean, block.ln2_rstd, block.ln2w, block.ln2b, self.scratch)

    def _fc(self, block):
        self.linear.forward(block.fch, self._all_rows(block, "ln2"), block.fcw, block.fcb)

    def _gelu(self, block):
        self.ops.gelu_forward(block.fch_gelu, block.fch, self.scratch)

    def _fc_gelu(self, block):
        self.ops.matmul_gelu_forward(block.fch_gelu, block.fch, self._all_rows(block, "ln2"), block.fcw, block.fcb)

    def _fcproj(self, block, above):
        self._summed_matmul(block.residual3, block.fch_gelu, block.fcprojw, block.fcprojb)
        if above is None:
            residual_add_inplace(block.residual3, block.residual2)
        else:
            self.ops.residual_layernorm_forward(
                block.residual3, above.ln1, above.ln1_mean, above.ln1_rstd, block.residual2, above.ln1w, above.ln1b, self.scratch
            )

    # ------------------------------------------------------------------------
    # head: logits exist for one chunk of rows at a time

    def _head_chunks(self):
        """Each chunk, as a slice of this part's rows."""
        rows, size = (n // self.division.size for n in (self.B * self.T, len(self.acts["logits"])))
        return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]

    def _classify(self, chunk, dloss):
        """Add to the losses of a chunk of rows, those of all parts. Returns the chunk's logits, which have become their own gradient if
        dloss is given, and its rows of lnf."""
        a, lnf = self.acts, self.division.head_rows(self.acts["lnf"], chunk)
        logits = a["logits"][: len(lnf)]
        self.head_linear.forward(logits, lnf, self.params["wte"])
        self.division.classify(
            self.ops, logits, a["losses"], a["targets"], chunk, self.scratch,
            V=self.config.vocab_size, dloss=dloss, rows_at_once=classifier_rows(self.plan.options),
        )  # fmt: skip
        return logits, lnf

    def token_losses(self, inputs, targets):
        """Loss of every token: (B, T) fp32, a view that the next step overwrites."""
        copy_in(self.acts["inputs"], inputs)
        copy_in(self.acts["targets"], targets)
        self.run("evaluation", self._evaluate)
        return self.acts["losses"]

    def _evaluate(self):
        self._forward(for_backward=False)
        self.acts["losses"].zero_()
        for chunk in self._head_chunks():
            self._classify(chunk, None)

    # ------------------------------------------------------------------------
    # backward

    def train(self, inputs, targets, grad_accum_steps=1, micro_step=0, order=None):
        """Forward and backward of one micro-step: its part of the gradient of the mean loss over all micro-steps, into grads.

        inputs, targets (B, T) int64; order is the TokenOrder of the inputs, computed here if it is None. Micro-step 0 writes
        the gradients, later ones add to them.
        """
        copy_in(self.acts["inputs"], inputs)
        staged = self._stage_backward(targets, order or token_order(inputs))

        def forward_and_backward():
            self._forward()
            self._backward(grad_accum_steps, micro_step, staged)

        self.run(f"micro-step of {grad_accum_steps}, {'adding' if micro_step else 'writing'}", forward_and_backward)

    def _stage_backward(self, targets, order):
        """Copy in what backward needs to know of this batch. Returns what launch_encoder_backward takes as `staged`."""
        copy_in(self.acts["targets"], targets)
        seed = (self.rng.u32() + self.sharing.rank * ENCODER_SEEDS) % 2**32
        return self.ops.stage_encoder_backward(self.division.own_order(order), seed, self.scratch)

    def _backward(self, grad_accum_steps, micro_step, staged):
        a, sharing = self.acts, self.sharing
        self.accumulate = micro_step > 0 and not self.plan.options.reduces_always  # else they add up after the sum over ranks
        if micro_step == 0:
            a["losses"].zero_()

        def complete(bucket):
            sharing.complete(bucket, adding=micro_step > 0, last=micro_step == grad_accum_steps - 1)

        sharing.clear("lnf")
        self._head_backward(1.0 / self.tokens(grad_accum_steps))
        a["dresidual"].zero_()
        self._norm_backward(self.final, a["lnf"])
        sharing.release("outer")
        complete("lnf")
        for span, again, then in self.plan.segments.backward():
            if again:
                sharing.need(again[0])
                self._ln1_forward(self.blocks[again[0]])
            for l in again:
                self._block_forward(self.blocks[l], self.blocks[l + 1] if l != again[-1] else None)
            for l in reversed(span):
                self.residuals.before_backward(l)
                sharing.need(l, then=l - 1 if l > span.start else then)
                sharing.clear(l)
                for backward in self.backward_passes:
                    backward(self, self.blocks[l])
                complete(l)
        self.ops.launch_encoder_backward(
            self.grads["wte"], self.grads["wpe"], self.division.gathered(a["dresidual"]), a["inputs"], staged, self.scratch,
            accumulate=self.accumulate,
        )  # fmt: skip
        complete("encoder")
        sharing.finish()  # the sums may lie in memory that the next forward pass, or the update, uses for something else

    def _head_backward(self, dloss):
        """Losses, lnf's gradient, written over lnf (a chunk's rows are not read again), and wte's gradient, one chunk of rows at a time.

        Over more than a few chunks a bf16 sum would lose bits: then the chunks of a group are summed in bf16, and the groups in fp32.
        """
        a, dwte, chunks = self.acts, self.grads["wte"], self._head_chunks()
        in_groups = head_sums(self.plan.options)
        group_sum = a["dwte_group"] if in_groups else dwte
        groups = [chunks[i : i + HEAD_GROUP] for i in range(0, len(chunks), HEAD_GROUP)] if in_groups else [chunks]
        for g, group in enumerate(groups):
            for i, chunk in enumerate(group):
                logits, lnf = self._classify(chunk, dloss)
                self.head_linear.dweight(group_sum, logits, lnf, accumulate=i > 0 or self.accumulate and not in_groups)
                self.head_linear.dinput(lnf, logits, self.params["wte"])
                self.division.sum_head_rows(a["lnf"], chunk)
            if in_groups and g == 0:
                a["dwte_sum"].copy_(group_sum)
            elif in_groups:
                add_widened(a["dwte_sum"], group_sum, self._room_of_logits())
        if in_groups:
            if self.accumulate:
                add_widened(a["dwte_sum"], dwte, self._room_of_logits())
            dwte.copy_(a["dwte_sum"])

    def _room_of_logits(self):
        """The memory of a chunk's bf16 logits, which are no longer needed, as flat fp32 scratch that is small enough for a cache."""
        logits = self.acts["logits"].view(-1)
        return logits[: len(logits) // 2 * 2].view(torch.float32)[: self.tuning.row_elements]

    def tokens(self, grad_accum_steps) -> int:
        """Tokens of a step, over all ranks."""
        return self.B * self.T * grad_accum_steps * self.sharing.size

    def _gathered_matmul_backward(self, block, name, dinp, dweight, dout, weight):
        """Backward of a matmul whose input is all parts' rows of ln1 or ln2."""
        self.linear.take_dout(dout)
        self.linear.dweight(dweight, dout, self._all_rows(block, name, again=True), accumulate=self.accumulate)
        self.linear.dinput(self.division.partial(dinp), dout, weight)
        self.division.sum_partial(dinp)

    def _fcproj_dinput(self, block):
        dout = self.division.gathered(self.acts["dresidual"])
        self.fcproj_linear.take_dout(dout)
        self.fcproj_linear.dinput(self.acts["dfch"], dout, block.fcprojw)

    def _fcproj_dinput_gelu(self, block):
        a = self.acts
        self.ops.matmul_gelu_backward(a["dfch"], self.division.gathered(a["dresidual"]), block.fcprojw, block.fch)
        self.ops.matmul_dbias(block.dfcb, a["dfch"], self.scratch, accumulate=self.accumulate)

    def _gelu_backward(self, block):
        self.ops.gelu_backward_inplace(self.acts["dfch"], block.dfcb, block.fch, self.scratch, accumulate=self.accumulate)

    def _gelu_backward_and_again(self, block):
        self.ops.gelu_backward_inplace(
            self.acts["dfch"], block.dfcb, block.fch, self.scratch, accumulate=self.accumulate, out_again=block.fch_gelu
        )

    def _fcproj_dweight(self, block):
        dout = self.division.still_gathered(self.acts["dresidual"])
        self.fcproj_linear.dweight(block.dfcprojw, dout, block.fch_gelu, accumulate=self.accumulate)

    def _fc_backward(self, block):
        self._gathered_matmul_backward(block, "ln2", self.acts["dln2"], block.dfcw, self.acts["dfch"], block.fcw)

    def _ln2_backward(self, block):
        a = self.acts
        self.ops.layernorm_backward(
            a["dresidual"], block.dln2w, block.dln2b, block.dattprojb, a["dln2"],
            block.residual2, block.ln2w, block.ln2_mean, block.ln2_rstd, self.scratch, accumulate=self.accumulate,
        )  # fmt: skip

    def _attproj_backward(self, block):
        dout = self.division.gathered(self.acts["dresidual"])
        self.linear.take_dout(dout)
        self.linear.dweight(block.dattprojw, dout, block.atty, accumulate=self.accumulate)
        self.linear.dinput(self.acts["datty"], dout, block.attprojw)

    def _attention_backward(self, block):
        a = self.acts
        self.ops.attention_backward(
            a["dqkvr"], block.dqkvb, a["datty"], block.qkvr, block.atty, block.lse, self.NH, self.scratch, accumulate=self.accumulate
        )

    def _qkv_backward(self, block):
        self._gathered_matmul_backward(block, "ln1", self.acts["dln1"], block.dqkvw, self.acts["dqkvr"], block.qkvw)

    def _ln1_backward(self, block):
        self._norm_backward(block, self.acts["dln1"])

    def _norm_backward(self, block, dln1):
        self.ops.layernorm_backward(
            self.acts["dresidual"], block.dln1w, block.dln1b, block.dproj_bias, dln1,
            block.residual, block.ln1w, block.ln1_mean, block.ln1_rstd, self.scratch, accumulate=self.accumulate,
        )  # fmt: skip

    # ------------------------------------------------------------------------
    # update

    def grad_norm(self) -> torch.Tensor:
        """Global norm of the gradient, before clipping: one fp32 number, which stays on the device until it is read."""
        self.run("norm", self._norm)
        return self.acts["grad_norm"][0]

    def _norm(self):
        """The gradient's norm, and the sum of the losses, which is read along with it."""
        a, sharing = self.acts, self.sharing
        sharing.release_all()  # also if no update follows: the slots of weights may share memory with this scratch
        torch.sum(a["losses"].view(-1), 0, keepdim=True, out=a["loss_sum"])
        self.ops.global_norm(a["grad_norm"], sharing.gradients(), self.scratch, piece=self.tuning.update_elements)
        sharing.combine(a.get("rank_numbers"), a["loss_sum"], a["grad_norm"])

    def update(self, learning_rate, weight_decay, step, grad_norm):
        """One AdamW step; `step` counts from 1. grad_norm, a tensor or a number, is the gradient's norm, which is clipped to at most 1."""
        last_seeds, self.rng_state_last_update = XorShift(self.rng_state_last_update), self.rng.state
        tensors = tensor_states(self.layout, self.rng, last_seeds)
        numbers = dict(lr=learning_rate, weight_decay=weight_decay, step=step, grad_norm=grad_norm)
        staged = self.ops.stage_adamw_update(tensors, self.scratch, **numbers)

        def update():
            self.ops.launch_adamw_update(self.sharing.updated(), staged, self.scratch)
            self.sharing.spread()

        self.run("update", update)

    def master_pieces(self):
        """Yields the fp32 weights that this rank's next update starts from, flat, a piece at a time in the order of its arenas. Each
        piece may be overwritten by the next."""
        flat = self.sharing.updated()
        for tensor, piece in self._weight_pieces():
            yield read_master(flat, piece, tensor.seed, self.scratch)

    def load_master(self, master):
        """Load fp32 weights into the master, whatever form that has, and round the bf16 weights from them.

        master(at, n) reads n of them from element `at` on, in the order of this rank's arenas. rng_state_last_update must be the
        state with which the weights were last rounded.
        """
        flat = self.sharing.updated()
        for tensor, piece in self._weight_pieces():
            self.sharing.moved()
            n = piece.flat.stop - piece.flat.start
            values = flat["master"][piece.flat] if "master" in flat else self.acts["update_parameter"][:n]
            values.copy_(torch.from_numpy(master(piece.flat.start, n)))
            write_master(flat, piece, values, *piece_noise(piece, tensor.seed, self.scratch))
        self.sharing.spread()

    def last_tensor_states(self):
        """What tensor_states gave to the last update, but with 0 for each last_seed."""
        return tensor_states(self.layout, XorShift(self.rng_state_last_update))

    def _weight_pieces(self):
        """Yields (tensor, piece) for all weights as the last update left them; the tensors have that update's seeds."""
        for tensor in self.last_tensor_states():
            for piece in pieces_of(tensor, self.scratch):
                yield tensor, piece

    # ------------------------------------------------------------------------
    # sampling: one row at a time over a key/value cache, which lies in the activation arena

    def next_logits(self, token: int, position: int) -> np.ndarray:
        """Logits (V,) fp32 after `token` at `position`; positions 0..position-1 must have been given before.

        Overwrites the activations of the last training step.
        """
        a, p = self.acts, self.params
        x, ln, qkvr, atty, fch = (a[f"sample_{n}"] for n in ("residual", "ln", "qkvr", "atty", "fch"))
        scratch, multiply = {"rows": a.get("sample_rows")}, self.ops.matmul_one_row

        def norm(weight, bias):
            mean, rstd = a["sample_stats"]
            self.ops.layernorm_forward(ln, mean, rstd, x, weight, bias, scratch)

        self.sharing.need("outer", then=0)
        torch.add(self.division.embedding(p["wte"], token), p["wpe"][position], out=x[0])
        for block, above, cache in zip(self.blocks, [*self.blocks[1:], self.final], a["kv_cache"]):
            self.sharing.need(block.number, then=above.number)
            norm(block.ln1w, block.ln1b)
            multiply(qkvr, ln, block.qkvw, block.qkvb)
            self.ops.attention_one_row(atty, qkvr, cache, position, self.NH)
            multiply(ln, atty, block.attprojw, self.division.bias(block.attprojb))
            self.division.sum_row(ln)
            residual_add_inplace(x, ln)
            norm(block.ln2w, block.ln2b)
            multiply(fch, ln, block.fcw, block.fcb)
            self.ops.gelu_forward(fch, fch, scratch)
            multiply(ln, fch, block.fcprojw, self.division.bias(block.fcprojb))
            self.division.sum_row(ln)
            residual_add_inplace(x, ln)
        norm(p["lnfw"], p["lnfb"])
        logits = a["logits"][:1]
        multiply(logits, ln, p["wte"])
        return self.division.whole_row(logits)[0, : self.config.vocab_size].to(torch.float32, copy=True).cpu().numpy()

    # ------------------------------------------------------------------------
    # train by halves, and mean losses of this rank alone: for scripts and tests, the trainer needs neither

    def forward(self, inputs):
        """Run inputs (B, T) int64 (numpy or torch) through all blocks and the last layernorm."""
        copy_in(self.acts["inputs"], inputs)
        self._forward()

    def backward(self, targets, grad_accum_steps=1, micro_step=0, order=None):
        """The second half of train, to be called after forward."""
        staged = self._stage_backward(targets, order or token_order(self.acts["inputs"].cpu()))
        self._backward(grad_accum_steps, micro_step, staged)

    def mean_loss(self, grad_accum_steps=1) -> float:
        """Mean training loss of this rank over the micro-steps since micro-step 0."""
        return self.acts["losses"].sum().item() / (self.B * self.T * grad_accum_steps)

    def loss_of(self, inputs, targets) -> float:
        """Mean loss of one batch."""
        return self.token_losses(inputs, targets).mean().item()


def tensor_states(layout, seeds: XorShift, last_seeds: XorShift | None = None) -> list[TensorState]:
    """The tensors of a flat_layout as the update sees them, each with its rounding seed, drawn in file order as llm.c does, and the
    seed of its last rounding, or 0 without them."""
    return [
        TensorState(
            t.start, t.layers, t.elements, t.parameter.decay,
            seed=seeds.u32(), last_seed=last_seeds.u32() if last_seeds else 0, noise_first=t.noise_first,
        )
        for t in layout
    ]  # fmt: skip


def run_at_once(name, work):
    """Stands in for Graphs.run where nothing is captured."""
    work()
