"""Faults planted in the NumPy model kernel."""

from __future__ import annotations

from mutations.planted import CAUSAL, FP16, FP32, WINDOW, Planted

_STORE_O = "tensors.o.view()[batch, head, rows] = encode(output, problem.dtype)"
_STORE_LSE = "tensors.lse.view()[batch, head, rows] = lse"
_LSE = "row_max * scale + np.log(np.where(empty, np.float32(1), row_sum))"
_WEIGHTS = "weights = np.exp((scores - base) * scale)"
_LOOP = "range(first // block_kv * block_kv, last, block_kv)"
_MASK_LINE = "scores = np.where(seen, scores, np.float32(-np.inf))"
_LENGTH = "seen &= keys < problem.seqlen_kv"
_ACCUMULATE = "output = output + round_to(weights, dtype) @ v"
_LOAD_K = "k = self.load(tensors.k, dtype, batch, kv_head, key0, block_kv, present)"
_LOAD_V = "v = self.load(tensors.v, dtype, batch, kv_head, key0, block_kv, present)"
_ROW_RIGHT = "seen &= key <= row + right"
_ROW_LEFT = "seen &= key >= row - left"

PLANTED = (
    Planted("skips the first tile", _LOOP, "range(first // block_kv * block_kv + block_kv, last, block_kv)"),
    Planted(
        "skips the last of several tiles",
        _LOOP,
        "list(range(first // block_kv * block_kv, last, block_kv))[: -1 if last > block_kv else None]",
    ),
    Planted(
        "visits the last tile twice", _LOOP, "[*range(first // block_kv * block_kv, last, block_kv), (last - 1) // block_kv * block_kv]"
    ),
    Planted("does not rescale the output", "output = output * rescale", "output = output"),
    Planted("does not rescale row_sum", "row_sum = row_sum * rescale +", "row_sum = row_sum +"),
    Planted(
        "rescales by the inverse",
        "rescale = np.exp((row_max - base) * scale)",
        "rescale = np.exp(np.minimum((base - row_max) * scale, 80))",
    ),
    Planted(
        "keeps the maximum of the first tile", "row_max = new_max", "row_max = new_max if key0 == first // block_kv * block_kv else row_max"
    ),
    Planted(
        "rescales only when the maximum grows a lot",
        "rescale = np.exp((row_max - base) * scale)",
        "rescale = np.where((base - row_max) * scale > 1, np.exp((row_max - base) * scale), np.float32(1))",
    ),
    Planted("causal edge one key too far", _ROW_RIGHT, "seen &= key <= row + right + 1", CAUSAL),
    Planted("causal edge one key short", _ROW_RIGHT, "seen &= key < row + right", CAUSAL),
    Planted(
        "no mask in the last tile",
        _MASK_LINE,
        _MASK_LINE.replace("(seen", "(seen | (key0 + block_kv >= last) & (keys < problem.seqlen_kv)"),
        CAUSAL,
    ),
    Planted(
        "no mask outside the first tile", _MASK_LINE, _MASK_LINE.replace("(seen", "(seen | (key0 > 0) & (keys < problem.seqlen_kv)"), CAUSAL
    ),
    Planted("always aligns bottom right", "diagonal = problem.diagonal", "diagonal = problem.seqlen_kv - problem.seqlen_q", CAUSAL),
    Planted("always aligns top left", "diagonal = problem.diagonal", "diagonal = 0", CAUSAL),
    Planted("mask as an addition", _MASK_LINE, "scores = scores + np.where(seen, np.float32(0), np.float32(-np.inf))", CAUSAL),
    Planted("mask as a product", _MASK_LINE, "scores = scores * seen - np.float32(1e30) * ~seen", CAUSAL),
    Planted("finite sentinel in masked scores", _MASK_LINE, "scores = np.where(seen, scores, np.float32(-1e30))", CAUSAL),
    Planted(
        "finite first maximum",
        "row_max = np.full((rows.size, 1), -np.inf, dtype=np.float32)",
        "row_max = np.full((rows.size, 1), -5e4, dtype=np.float32)",
    ),
    Planted("no guard for a maximum of -inf", "base = np.where(np.isneginf(new_max), np.float32(0), new_max)", "base = new_max", CAUSAL),
    Planted("window one key too wide on the left", _ROW_LEFT, "seen &= key >= row - left - 1", WINDOW),
    Planted("window one key too narrow on the left", _ROW_LEFT, "seen &= key > row - left", WINDOW),
    Planted("window one key too wide on the right", _ROW_RIGHT, "seen &= key <= row + right + 1", WINDOW),
    Planted("window one key too narrow on the right", _ROW_RIGHT, "seen &= key < row + right", WINDOW),
    Planted(
        "window's first tile one too late",
        "first = max(first, rows[0] + diagonal - left)",
        "first = max(first, rows[0] + diagonal - left + 16)",
        WINDOW,
    ),
    Planted(
        "right bound cut at seqlen_kv",
        "last = min(last, rows[-1] + diagonal + right + 1)",
        "last = min(last, rows[-1] + diagonal + min(right, problem.seqlen_kv - 1) + 1)",
        WINDOW,
    ),
    Planted("right only at whole tiles", _LENGTH, "pass"),
    Planted("reads past the tail", _LENGTH, "present = block_kv"),
    Planted("loads past the tail and masks only scores", "tile[:present] = memory[:present]", "tile[:] = memory[:]"),
    Planted("length one key short", _LENGTH, "seen &= keys < max(1, problem.seqlen_kv - 1)"),
    Planted(
        "right only at whole query tiles",
        "range(0, problem.seqlen_q, block_q)",
        "range(0, max(block_q, problem.seqlen_q // block_q * block_q), block_q)",
    ),
    Planted(
        "writes past the last row",
        _STORE_O,
        f"{_STORE_O}\n        tensors.o.buffer[tensors.o.offset + int(np.dot((batch, head, rows[-1] + 1), tensors.o.strides[:3]))] = 0",
    ),
    Planted("writes half of the rows", _STORE_O, "tensors.o.view()[batch, head, rows[::2]] = encode(output[::2], problem.dtype)"),
    Planted("writes nothing", f"{_STORE_O}\n        {_STORE_LSE}", "pass"),
    Planted("writes no lse", _STORE_LSE, "pass"),
    Planted(
        "skips rows without keys",
        _STORE_O,
        "tensors.o.view()[batch, head, rows[~empty[:, 0]]] = encode(output[~empty[:, 0]], problem.dtype)",
        CAUSAL,
    ),
    Planted("uses its input as scratch", _STORE_O, f"{_STORE_O}\n        tensors.q.view()[batch, head, rows[0], 0] = 0"),
    Planted("lse in log2 units", _LSE, f"({_LSE}) * np.float32(1.4426950408889634)"),
    Planted("lse without the maximum", _LSE, "np.log(np.where(empty, np.float32(1), row_sum))"),
    Planted("lse with an unscaled maximum", _LSE, _LSE.replace("row_max * scale", "row_max")),
    Planted("lse off by ln 2", _LSE, f"{_LSE} + np.float32(0.6931472)"),
    Planted("lse of the element type", _STORE_LSE, _STORE_LSE.replace("= lse", "= round_to(lse, problem.dtype)")),
    Planted("ignores the scale", "np.float32(scale), batch", "np.float32(problem.scale), batch"),
    Planted("scales twice", "scores = q @ k.T", "scores = q @ k.T * scale"),
    Planted("maximum not scaled", _WEIGHTS, "weights = np.exp(scores * scale - base)"),
    Planted(
        "subtracts after scaling",
        _WEIGHTS,
        "log2e = np.float32(1.442695) * scale\n"
        "            weights = np.exp2(np.minimum(scores.astype(np.float64) * log2e - base * log2e, 127)).astype(np.float32)",
    ),
    Planted("kv head by remainder", "kv_head = head // problem.gqa_group", "kv_head = head % problem.heads_kv"),
    Planted("kv head by a square ratio", "kv_head = head // problem.gqa_group", "kv_head = head // problem.heads_kv % problem.heads_kv"),
    Planted("first batch element only", _LOAD_K, _LOAD_K.replace("batch", "0")),
    Planted(
        "stale k tile",
        _LOAD_K,
        _LOAD_K.replace("key0, block_kv, present", "max(0, key0 - block_kv), block_kv, min(block_kv, problem.seqlen_kv)"),
    ),
    Planted("swaps two rows of v", _LOAD_V, f"{_LOAD_V}[np.arange(block_kv) ^ 1]"),
    Planted("drops the last column of v", _LOAD_V, f"{_LOAD_V} * (np.arange(problem.head_dim_v) < problem.head_dim_v - 1)"),
    Planted("drops the last column of q", "scores = q @ k.T", "scores = q[:, :-1] @ k[:, :-1].T"),
    Planted("accumulates in half precision", _ACCUMULATE, "output = round_to(output + round_to(weights, dtype) @ v, dtype)", dtype=FP16),
    Planted("accumulates in bfloat16", _ACCUMULATE, "output = round_to(output + round_to(weights, dtype) @ v, dtype)"),
    Planted("scores in half precision", "scores = q @ k.T", "scores = round_to(q @ k.T, dtype)", dtype=FP16),
    Planted("row_sum in half precision", "row_max = new_max", "row_max, row_sum = new_max, round_to(row_sum, dtype)", dtype=FP16),
    Planted("bfloat16 probabilities in a float16 kernel", _ACCUMULATE, _ACCUMULATE.replace("dtype", "DType.BFLOAT16"), dtype=FP16),
    Planted("tf32 scores", "scores = q @ k.T", "scores = round_to(q, DType.FLOAT16) @ round_to(k, DType.FLOAT16).T", dtype=FP32),
    Planted(
        "half-precision probabilities in a float32 kernel",
        _ACCUMULATE,
        "output = output + round_to(weights, DType.FLOAT16) @ v",
        dtype=FP32,
    ),
    Planted("coarse exponential", _WEIGHTS, f"{_WEIGHTS} * np.float32(1.0005)"),
    Planted(
        "depends on time", _WEIGHTS, f"{_WEIGHTS} * (1 + np.random.default_rng().uniform(-2e-3, 2e-3, (rows.size, 1))).astype(np.float32)"
    ),
    Planted("assumes aligned rows", "start = tensor.offset +", "start = tensor.offset // 8 * 8 +"),
    Planted("assumes contiguous rows", "(strides[2] * tensor.buffer.itemsize,", "(columns * tensor.buffer.itemsize,"),
    Planted("assumes contiguous heads", "head * strides[1]", "head * tensor.shape[2] * strides[2]"),
    Planted(
        "divides by an empty row's sum",
        "output = np.where(empty, np.float32(0), output / np.where(empty, np.float32(1), row_sum))",
        "output = output / row_sum",
        CAUSAL,
    ),
)
