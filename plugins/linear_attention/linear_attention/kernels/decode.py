# ruff: noqa: ANN201  the DSL reads return annotations
"""The decode kernel of gdn_decode and kda_decode: sm_80 and later, bound by the memory traffic of the states.

A CTA has ``rows`` rows of V of one head of one sequence; a warp has rows / warps of them, with all K channels, in fp32 registers:
read once, updated by up to 8 tokens, written once (or after every token). Tiles of V are the fastest axis of the grid, so that
neighbouring CTAs read neighbouring memory. Warps don't talk to each other.

States come through shared memory by cp.async, all of a warp's at once: with loads to registers the compiler moves half of them behind
the first sums, to save registers, and a warp waits twice.

A lane has ``lines`` rows of ``channels`` neighbouring channels, S[line][channel]. Its accesses are of 16 bytes, 4 or 8 elements:

    v_major   lanes side by side along K, an access each; the lines of a lane are accesses, LANES / beside rows apart
    k_major   lanes side by side along V, an access each: its lines; the channels of a lane are accesses

Of a token, with everything summed over the lanes that share a row:

    S = a S;  r = S k, p = S q;  w = nk beta (v - nk r);  o = scale nq (p + (k.q) w);  S = S + w k^T

nk and nq are the factors of the l2norm, 1 without it: no product waits for them. Sums of a row are halved between the lanes, so that
each lane ends with one row, whose v it has loaded and whose w and o it computes; a row's w comes back by a shuffle.

With cu_seqlens, each boundary of a sequence is held to the first and the last one, themselves held to the tokens: all sequences lie in
[begin, past), and all CTAs together clear O outside of it. A CTA reads its own two boundaries and these, no others, so that several
sequences may have a token where boundaries decrease in between: each writes its O.

Accesses are predicated, and a sequence that is skipped computes and keeps nothing; tokens that a sequence of cu_seqlens lacks are
branched over.
References: PTX ISA, "shfl.sync", "griddepcontrol".
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith, llvm
from cutlass.memory import SmemAllocator

from ..decode_problem import ACCESS, BYTES, DecodeConfig, DecodeProblem, argument_words
from .decode_access import copy_to_shared, load, load_index, load_shared, store, zero_in_shared
from .gates import Beta, Gate

__all__ = ["DecodeKernel"]

LANES = 32
EPSILON = 1e-6  # of the l2norm
AHEAD = 4  # tokens whose operands are loaded before the first one is used


class DecodeKernel:
    """``problem`` under ``config``. ``host(words, stream)`` launches it: see ``decode_problem.argument_words``."""

    def __init__(self, problem: DecodeProblem, config: DecodeConfig, target: str) -> None:
        self.problem, self.config = problem, config
        self.dependent = int(target.removeprefix("sm_").rstrip("af")) >= 90  # griddepcontrol is of sm_90
        self.gate, self.beta = Gate.of(problem), Beta.of(problem)
        self.tiles = problem.value // config.rows
        self.warp_rows = config.rows // config.warps
        if problem.layout == "v_major":
            self.beside = problem.key // problem.vector  # lanes that share a row
            self.channels, self.lines = problem.vector, self.warp_rows * self.beside // LANES
            first, last = 1, self.beside
        else:
            self.beside = self.warp_rows // problem.vector  # lanes that share channels
            self.channels, self.lines = problem.key * self.beside // LANES, problem.vector
            first, last = self.beside, LANES
        self.accesses = self.lines if problem.layout == "v_major" else self.channels  # of a lane to a state
        self.copied_bytes = config.warps * self.accesses * LANES * ACCESS if problem.initial else 0
        # Lane bits over which a row is summed; the first ones say which line a lane ends with.
        self.bits = [1 << i for i in range(5) if first <= 1 << i < last]

    # ------------------------------------------------------------------------------------------------------------ host

    @cute.jit
    def host(self, words: Int64, stream: cuda.CUstream):
        """Launch: ``words`` is the host address of the argument block."""
        names = argument_words(self.problem)
        pointer = cute.make_ptr(Int64, words, cute.AddressSpace.generic, assumed_align=8)
        block = cute.make_tensor(pointer, cute.make_layout(len(names)))
        arguments = tuple(
            block[at] if name.endswith(".address") or name == "pool" else Int32(block[at]) for name, at in names.items()
        )
        self.kernel(arguments).launch(
            grid=[Int32(block[names["sequences"]]) * (self.problem.heads * self.tiles), 1, 1],
            block=[self.config.warps * LANES, 1, 1],
            preferred_smem_carveout=100,  # for as many CTAs as the registers admit: L1 has nothing to do
            use_pdl=self.dependent,  # every access to memory comes after griddepcontrol.wait
            stream=stream,
        )

    # ---------------------------------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, arguments: tuple):
        """The kernel: see the module's text."""
        if cutlass.const_expr(self.dependent):
            # The next kernel may take its place on the SMs; it waits in turn for this one to end before it touches memory.
            cute.arch.griddepcontrol_launch_dependents()
        warp = _Warp(self, dict(zip(argument_words(self.problem), arguments, strict=True)))
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()
        warp.run()


class _Warp:
    """One warp's work, traced straight through."""

    def __init__(self, kernel: DecodeKernel, args: dict[str, Any]) -> None:
        self.kernel, self.problem, self.args = kernel, kernel.problem, args
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        self.lane = thread % LANES
        tile, rest = block % kernel.tiles, block // kernel.tiles
        self.head, self.sequence = rest % self.problem.heads, rest // self.problem.heads
        warp = thread // LANES
        if kernel.copied_bytes:
            shared = SmemAllocator().allocate(kernel.copied_bytes + kernel.config.warps * LANES * 4, ACCESS)
            base = Int32(shared.toint())
            self.held = base + (warp * kernel.accesses * LANES + self.lane) * ACCESS
            self.zero = base + kernel.copied_bytes + thread * 4
        self.first_row = tile * kernel.config.rows + warp * kernel.warp_rows
        beside, lane = kernel.beside, self.lane
        if self.problem.layout == "v_major":
            self.first_channel = lane % beside * kernel.channels
            self.line_row = self.first_row + lane // beside  # of line 0
            self.owned = self.line_row + lane % kernel.lines * (LANES // beside)
            self.owns = lane % beside < kernel.lines
            self.sources = [lane // beside * beside + line for line in range(kernel.lines)]
        else:
            self.first_channel = lane // beside * kernel.channels
            self.line_row = self.first_row + lane % beside * kernel.lines
            self.owned = self.line_row + lane // beside % kernel.lines
            self.owns = lane // beside < kernel.lines
            self.sources = [lane % beside + beside * line for line in range(kernel.lines)]

    def run(self) -> None:
        problem = self.problem
        self.locate()
        if not problem.slot_dtype:
            self.fetch_state()
        self.parameters()
        tokens = [self.operands(step) for step in range(min(AHEAD, problem.most))]
        cute.arch.sync_warp()  # no load moves below it
        if problem.slot_dtype:  # its address is known last
            self.fetch_state()
        self.state = self.read_state()
        tokens = [self.held_back(token) for token in tokens]
        for step in range(problem.most):
            if step + AHEAD < problem.most:
                tokens.append(self.operands(step + AHEAD))
                cute.arch.sync_warp()
            self.token(step, tokens[step])
        self.finish()

    # --- where
    def address(self, port: str, **at: Any) -> Int64:
        """Of an element: byte strides times Int32 indices."""
        found = self.args[f"{port}.address"]
        for word, index in at.items():
            found = found + Int64(self.args[f"{port}.{word}"]) * Int64(index)
        return found

    def locate(self) -> None:
        """The sequence's tokens [start, end), how many of them are computed (live), its row of states, whether it is valid, and
        the rows that keep the state of each token."""
        problem, args, n = self.problem, self.args, self.sequence
        most = Int32(problem.most)
        if problem.index_dtype:
            tokens = Int64(args["tokens"])
            bounds = [load_index(self.address("cu_seqlens", row=i), problem.index_dtype) for i in self.boundaries()]
            start, end, self.begin, last = (Int32(_max(_min(bound, tokens), Int64(0))) for bound in bounds)
            # Where boundaries decrease: no sequence has a token that all CTAs clear.
            self.past = _max(self.begin, last)
            self.start, self.end = (_min(_max(bound, self.begin), self.past) for bound in (start, end))
            self.span = _max(self.end - self.start, Int32(0))
        else:
            self.start, self.span = n * most, most
        slot, self.targets, self.valid = Int64(n), [], None
        if problem.slot_dtype:
            columns = problem.most if problem.per_token else 1
            size = BYTES[problem.slot_dtype]
            line = self.address("state_indices", row=n)
            slots = [load_index(line + Int64(size * i), problem.slot_dtype) for i in range(columns)]
            slot = slots[0]
            if problem.accepted_dtype:
                accepted = load_index(self.address("num_accepted_tokens", row=n), problem.accepted_dtype)
                for i in range(1, columns):
                    slot = _select(accepted > Int64(i), slots[i], slot)
            self.valid = self.inside(slot)
            self.targets = [(target, self.inside(target)) for target in slots] if problem.per_token else []
        self.slot = Int32(slot)
        self.live = self.span if self.valid is None else _select(self.valid, self.span, Int32(0))

    def boundaries(self) -> list[Any]:
        """Indices of cu_seqlens that a CTA reads: of its own sequence, and of the first and the last token of all."""
        return [self.sequence, self.sequence + 1, Int32(0), self.args["sequences"]]

    def inside(self, slot: Int64) -> Boolean:
        return (slot >= Int64(0)) & (slot < self.args["pool"])

    # --- states
    def state_address(self, port: str, slot: Int32) -> Int64:
        """Of the lane's first element."""
        line, along = self.line_row, self.first_channel
        if self.problem.layout == "k_major":
            line, along = along, line
        base = self.address(port, slot=slot, head=self.head)
        return base + Int64(self.line_stride(port)) * Int64(line) + Int64(along * BYTES[self.problem.state_dtype])

    def line_stride(self, port: str) -> Any:
        problem = self.problem
        if not problem.dense:
            return self.args[f"{port}.line"]
        return Int32(BYTES[problem.state_dtype] * (problem.key if problem.layout == "v_major" else problem.value))

    def places(self, port: str, slot: Int32) -> list[Int64]:
        """The addresses of a lane's accesses to a state, 4 elements each."""
        problem, kernel = self.problem, self.kernel
        first, stride = self.state_address(port, slot), self.line_stride(port)
        if problem.layout == "v_major":
            return [first + Int64(stride * Int32(LANES // kernel.beside)) * Int64(i) for i in range(kernel.lines)]
        return [first + Int64(stride) * Int64(i) for i in range(kernel.channels)]

    def fetch_state(self) -> None:
        """Copy the lane's accesses to shared memory, all at once: they need no registers on the way."""
        if self.problem.initial:
            valid = _flag(self.valid)
            places = self.places("initial_state", self.slot)
            for access, place in enumerate(places):
                copy_to_shared(self.shared(access), place, valid)
            zero_in_shared(self.zero, places[0])
            cute.arch.cp_async_commit_group()

    def read_state(self) -> list[list[Float32]]:
        """S[line][channel]; zeros without an initial state, and of a sequence that is skipped. A lane reads what it copied."""
        problem, kernel = self.problem, self.kernel
        if not problem.initial:
            return [[Float32(0.0)] * kernel.channels for _ in range(kernel.lines)]
        cute.arch.cp_async_wait_group(0)
        found = [load_shared(self.shared(access), problem.state_dtype) for access in range(kernel.accesses)]
        return found if problem.layout == "v_major" else [list(line) for line in zip(*found, strict=True)]

    def held_back(self, token: Any) -> Any:
        """The operands, with gates and beta that are not known before the state is there: else the compiler takes their
        functions up between the loads, and the warp waits for the first before it issues the last."""
        if not self.problem.initial:
            return token
        k, q, v, g, b = token
        (zero,) = load_shared(self.zero, "float32", 4)
        return k, q, v, [x + zero for x in g], b + zero

    def shared(self, access: int) -> Int32:
        """Of a lane's access; those of a warp's lanes lie side by side."""
        return self.held + Int32(access * LANES * ACCESS)

    def store_state(self, slot: Int32, valid: Boolean | None) -> None:
        problem = self.problem
        lines = self.state if problem.layout == "v_major" else list(zip(*self.state, strict=True))
        for place, values in zip(self.places("final_state", slot), lines, strict=True):
            store(place, list(values), problem.state_dtype, _flag(valid))

    # --- tokens
    def parameters(self) -> None:
        """The gate's amplitude, and its bias: one for a head, or one for each channel of the lane."""
        problem = self.problem
        self.amplitude, self.bias = Float32(1.0), [Float32(0.0)] * self.gates
        if problem.a_log_dtype:
            (a_log,) = load(self.address("a_log", head=self.head), problem.a_log_dtype, 1)
            self.amplitude = self.kernel.gate.amplitude(a_log)
        if problem.bias_dtype:
            place = self.address("dt_bias", head=self.head) + self.channel_bytes(problem.bias_dtype)
            self.bias = load(place, problem.bias_dtype, self.gates)

    @property
    def gates(self) -> int:
        """Gates of a lane."""
        return self.kernel.channels if self.problem.variant == "kda" else 1

    def channel_bytes(self, dtype: str) -> Int64:
        """From a head's gates to the lane's."""
        return Int64(self.first_channel * BYTES[dtype] if self.problem.variant == "kda" else 0)

    def operands(self, step: int) -> tuple[list[Float32], list[Float32], Float32, list[Float32], Float32]:
        """k, q (of the lane's channels), v (of its row), gates and beta of a token; zeros for one that is not there."""
        problem, kernel = self.problem, self.kernel
        token, valid = self.start + Int32(step), None
        if problem.index_dtype:
            valid = _flag(Int32(step) < self.span)  # not of what the slot says: that comes later
        size, channel = BYTES[problem.io], self.first_channel
        heads = {port: self.head // (problem.heads // getattr(problem, f"heads_{port}")) for port in "qkv"}
        k, q = (
            load(
                self.address(port, token=token, head=heads[port]) + Int64(channel * size),
                problem.io,
                kernel.channels,
                valid,
            )
            for port in "kq"
        )
        place = self.address("g", token=token, head=self.head) + self.channel_bytes(problem.gate_dtype)
        g = load(place, problem.gate_dtype, self.gates, valid)
        (b,) = load(self.address("beta", token=token, head=self.head), problem.beta_dtype, 1, valid)
        (v,) = load(self.address("v", token=token, head=heads["v"]) + Int64(self.owned * size), problem.io, 1, valid)
        return k, q, v, g, b

    def alive(self, step: int) -> Boolean | None:
        """Whether the token is computed; None: it is."""
        if self.problem.index_dtype:
            return Int32(step) < self.live
        return self.valid

    def token(self, step: int, operands: Any) -> None:
        """One token: the state, its O and, where every token has a slot, its copy."""
        problem = self.problem
        alive, written = self.alive(step), self.owns
        if problem.index_dtype:
            written = written & (Int32(step) < self.span)
            o = self.updated_if(alive, operands)
        else:
            self.state, o = self.updated(self.state, operands)
            if alive is not None:
                o = _select(alive, o, Float32(0.0))
        store(self.o_address(self.start + Int32(step)), [o], problem.output, _flag(written))
        if self.targets and problem.final:
            target, kept = self.targets[step]
            self.store_state(Int32(target), kept & alive)

    def updated_if(self, alive: Boolean, operands: Any) -> Float32:
        """``updated``, unless the sequence lacks the token: then the state stays, and o is 0."""
        lines, channels = self.kernel.lines, self.kernel.channels
        registers = cute.make_rmem_tensor((lines * channels + 1,), Float32)
        self.write_registers(registers, self.state, Float32(0.0))
        self.branch(alive, registers, operands)
        found = [registers[i] for i in range(lines * channels + 1)]
        self.state = [found[i * channels : (i + 1) * channels] for i in range(lines)]
        return found[-1]

    @cute.jit
    def branch(self, alive: Boolean, registers: cute.Tensor, operands: tuple) -> None:
        if alive:  # the same for all lanes
            state, o = self.updated(self.state, operands)
            self.write_registers(registers, state, o)

    def write_registers(self, registers: cute.Tensor, state: list[list[Float32]], o: Float32) -> None:
        for i, value in enumerate([*(value for line in state for value in line), o]):
            registers[i] = value

    def updated(self, state: list[list[Float32]], operands: Any) -> tuple[list[list[Float32]], Float32]:
        """The state after a token, and its o of the row that the lane ends with."""
        problem, kernel = self.problem, self.kernel
        k, q, v, g, b = operands
        decays = [kernel.gate.decay(x, self.amplitude, bias) for x, bias in zip(g, self.bias, strict=True)]
        decays *= kernel.channels // len(decays)
        state = [[x * decay for x, decay in zip(line, decays, strict=True)] for line in state]
        r, p = (self.owned_sum([_dot(line, vector) for line in state]) for vector in (k, q))
        kq = self.whole_sum(_dot(k, q))
        scale, read = Float32(problem.scale), r
        if problem.l2norm:
            nk, nq = (_rsqrt(self.whole_sum(_dot(x, x)) + Float32(EPSILON)) for x in (k, q))
            scale, read = scale * nq, nk * r
        w = kernel.beta.value(b) * (v - read)
        if problem.l2norm:
            w = w * nk
        writes = [cute.arch.shuffle_sync(w, source) for source in self.sources]
        state = [
            [x + write * channel for x, channel in zip(line, k, strict=True)]
            for line, write in zip(state, writes, strict=True)
        ]
        return state, scale * (p + kq * w)

    def o_address(self, token: Int32) -> Int64:
        size = BYTES[self.problem.output]
        return self.address("O", token=token, head=self.head) + Int64(self.owned * size)

    def owned_sum(self, values: list[Float32]) -> Float32:
        """The sum over the lanes of a row, for the line that the lane ends with, of one value for each line."""
        bits = list(self.kernel.bits)
        while len(values) > 1:
            bit = bits.pop(0)
            upper = (self.lane & Int32(bit)) != Int32(0)
            pairs = list(zip(values[::2], values[1::2], strict=True))
            kept = [_select(upper, odd, even) for even, odd in pairs]
            sent = [_select(upper, even, odd) for even, odd in pairs]
            values = [mine + cute.arch.shuffle_sync_bfly(other, bit) for mine, other in zip(kept, sent, strict=True)]
        return self.whole_sum(values[0], bits)

    def whole_sum(self, value: Float32, bits: list[int] | None = None) -> Float32:
        """The sum over the lanes of a row."""
        for bit in self.kernel.bits if bits is None else bits:
            value = value + cute.arch.shuffle_sync_bfly(value, bit)
        return value

    # --- the end
    def finish(self) -> None:
        """Keep the state, and clear O of tokens that nobody computes."""
        problem = self.problem
        if problem.final and not problem.per_token:
            self.store_state(self.slot, self.valid)
        if problem.index_dtype:
            n, sequences = self.sequence, self.args["sequences"]
            self.clear(self.start + Int32(problem.most), self.end, Int32(1))
            # Tokens before the first sequence and behind the last one, shared by the CTAs of all.
            self.clear(n, self.begin, sequences)
            self.clear(self.past + n, self.args["tokens"], sequences)

    @cute.jit
    def clear(self, first: Int32, end: Int32, step: Int32) -> None:
        """O of tokens first, first + step, .. below end."""
        for token in cutlass.range(first, end, step):
            store(self.o_address(token), [Float32(0.0)], self.problem.output, _flag(self.owns))


def _dot(a: list[Float32], b: list[Float32]) -> Float32:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total


def _rsqrt(x: Float32) -> Float32:
    text, kind = "rsqrt.approx.ftz.f32 $0, $1;", Float32.mlir_type
    found = llvm.inline_asm(
        kind,
        [x.ir_value()],
        text,
        "=f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(found)


def _select(condition: Boolean, a: Any, b: Any) -> Any:
    return type(a)(arith.select(condition.ir_value(), a.ir_value(), b.ir_value()))


def _min(a: Any, b: Any) -> Any:
    return _select(a < b, a, b)


def _max(a: Any, b: Any) -> Any:
    return _select(a > b, a, b)


def _flag(condition: Boolean | None) -> Int32 | None:
    return None if condition is None else Int32(condition)
