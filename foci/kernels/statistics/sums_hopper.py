"""Sums over the queries of a tile in the Hopper kernel: received weights of keys, and picture cells.

The tensor core layout gives a thread keys r and r + 8 of each 16, and two of every 8 queries: four lanes hold all
queries of a key. A thread adds its own values, two exchanges between lanes add the rest, and the lane that holds a sum
writes it: no shared memory, no barrier. The same lanes always add to the same addresses, so the results are
deterministic.
"""

# Device code carries no Python types.
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The number of keys of a tile.
BK = gl.constexpr(64)


@gluon.jit
def split_row_halves(tile):
    """Split rows r and r + 8 of each 16, which the tensor core layout keeps in one thread: two (BK // 16, 8, BQ)."""
    return tile.reshape((BK // 16, 2, 8, tile.shape[1])).permute((0, 2, 3, 1)).split()


@gluon.jit
def shuffle_lanes(a, DISTANCE: gl.constexpr):
    """The value of the lane whose index differs by XOR with DISTANCE."""
    ASM: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, " + DISTANCE + ", 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(ASM, "=f,f", [a], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def fold_lanes(low, high, bit, DISTANCE: gl.constexpr):
    """Lanes whose bit is 0 get the sum of low over two lanes, the others that of high: two sums in one exchange."""
    own = gl.where(bit, high, low)
    return own + shuffle_lanes(gl.where(bit, low, high), DISTANCE)


@gluon.jit
def sum_per_thread(x):
    """Sum the values of each thread: (BK // 16, 8, BQ) -> (BK // 16, 8, 4)."""
    return gl.sum(gl.sum(x.reshape((BK // 16, 8, x.shape[2] // 8, 4, 2)), 4), 2)


@gluon.jit
def strip_sums(p, STRIP: gl.constexpr, BY_KEY: gl.constexpr):
    """Sum over strips of queries, for keys r and r + 8 of 16: one value per thread each, (BK // 16, 8, 4).

    Returns the sums of both keys for each of the 1, 2 or 4 strips, and the sums over all strips for r and for r + 8.
    BY_KEY: not the sums of both keys, but those of r, then those of r + 8.
    """
    DOWN: gl.constexpr = p.shape[1] // STRIP
    sums = gl.sum(gl.sum(p.reshape((BK, DOWN, STRIP // 8, 4, 2)), 4), 2)
    first, second = sums.reshape((BK // 16, 2, 8, DOWN, 4)).permute((0, 2, 3, 4, 1)).split()
    if BY_KEY:
        strips = (split_strips(first, DOWN), split_strips(second, DOWN))
    else:
        strips = split_strips(first + second, DOWN)
    return strips, gl.sum(first, 2), gl.sum(second, 2)


@gluon.jit
def split_strips(both, DOWN: gl.constexpr):
    """(BK // 16, 8, DOWN, 4) -> DOWN times (BK // 16, 8, 4)."""
    if DOWN == 4:
        a, b = both.reshape((BK // 16, 8, 2, 2, 4)).permute((0, 1, 2, 4, 3)).split()
        a, c = a.permute((0, 1, 3, 2)).split()
        b, d = b.permute((0, 1, 3, 2)).split()
        strips = (a, b, c, d)
    elif DOWN == 2:
        strips = both.permute((0, 1, 3, 2)).split()
    else:
        strips = (gl.sum(both, 2),)
    return strips


@gluon.jit
def thread_coordinates(x):
    """The coordinates of the value that a thread holds of x (BK // 16, 8, 4): warp, key of 8, lane of 4."""
    L: gl.constexpr = x.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    zeros = warp * 0 + r * 0 + lane * 0
    return warp + zeros, r + zeros, lane + zeros


@gluon.jit
def add_received(t, first, second, columns, T, RAGGED: gl.constexpr):
    """Two of four lanes add, for key r and for r + 8: always the same ones, so the order of the sums is fixed."""
    warp, r, lane = thread_coordinates(first)
    received = fold_lanes(first, second, lane % 2 == 1, "1")
    received += shuffle_lanes(received, "2")
    key = warp * 16 + (lane % 2) * 8 + r
    there = lane < 2
    if RAGGED:
        there = there & (t * BK + key < T)
    gl.atomic_add(columns + t * BK + key, received, mask=there, sem="relaxed")


@gluon.jit
def write_cells(t, strips, cells_at, picture_columns, DOWN: gl.constexpr, WIDE: gl.constexpr):
    """Write cells of 16 keys: each warp has one column, and each of its first four lanes writes another strip.

    Cells that span several tiles are added to, always by the same lanes: each warp has its own part.
    """
    warp, r, lane = thread_coordinates(strips[0])
    odd = lane % 2 == 1
    if DOWN == 4:
        low = fold_lanes(strips[0], strips[2], odd, "1")
        high = fold_lanes(strips[1], strips[3], odd, "1")
        cell = fold_lanes(low, high, lane >= 2, "2")
        line = (lane % 2) * 2 + lane // 2
    elif DOWN == 2:
        cell = fold_lanes(strips[0], strips[1], odd, "1")
        cell += shuffle_lanes(cell, "2")
        line = lane % 2
    else:
        cell = strips[0] + shuffle_lanes(strips[0], "1")
        cell += shuffle_lanes(cell, "2")
        line = lane * 0
    cell += shuffle_lanes(cell, "4")
    cell += shuffle_lanes(cell, "8")
    cell += shuffle_lanes(cell, "16")
    there = (r == 0) & (lane < DOWN)
    if WIDE > 1:
        at = cells_at + t // WIDE * (BK // 16) + (line * picture_columns + warp)
        gl.atomic_add(at, cell, mask=there, sem="relaxed")
    else:
        gl.store(cells_at + t * (BK // 16) + (line * picture_columns + warp), cell, mask=there)


@gluon.jit
def divide(n, divisor, inverse):
    """n // divisor for n below 2**24: the quotient of floats, corrected; an integer division takes 30 instructions."""
    quotient = (n.to(gl.float32) * inverse).to(gl.int32)
    rest = n - quotient * divisor
    return quotient + (rest >= divisor).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit
def add_quads(strips, lane, DOWN: gl.constexpr):
    """Sum each strip over four lanes; lane l has the sum of strip (l % 2) * 2 + l // 2 of 4, or l % 2 of 2."""
    odd = lane % 2 == 1
    if DOWN == 4:
        low = fold_lanes(strips[0], strips[2], odd, "1")
        high = fold_lanes(strips[1], strips[3], odd, "1")
        total = fold_lanes(low, high, lane >= 2, "2")
    elif DOWN == 2:
        total = fold_lanes(strips[0], strips[1], odd, "1")
        total += shuffle_lanes(total, "2")
    else:
        total = strips[0] + shuffle_lanes(strips[0], "1")
        total += shuffle_lanes(total, "2")
    return total


@gluon.jit
def select_key(first, second, in_first, in_second):
    return gl.where(in_first, first, 0.0) + gl.where(in_second, second, 0.0)


@gluon.jit
def select_keys(first, second, in_first, in_second, DOWN: gl.constexpr):
    """The sum of key r where in_first and of key r + 8 where in_second, for each strip."""
    if DOWN == 4:
        strips = (
            select_key(first[0], second[0], in_first, in_second),
            select_key(first[1], second[1], in_first, in_second),
            select_key(first[2], second[2], in_first, in_second),
            select_key(first[3], second[3], in_first, in_second),
        )
    elif DOWN == 2:
        strips = (
            select_key(first[0], second[0], in_first, in_second),
            select_key(first[1], second[1], in_first, in_second),
        )
    else:
        strips = (select_key(first[0], second[0], in_first, in_second),)
    return strips


@gluon.jit
def write_cut_cells(t, strips, cells_at, picture_columns, cut, DOWN: gl.constexpr):
    """Write two sums of the 16 keys of a warp: of those before the next column of the picture, and of the others.

    Columns have at least 16 keys, so at most one starts among the keys of a warp. merge.py adds the parts of a column.
    """
    T, columns, inverse_T, inverse_columns = cut
    warp, r, lane = thread_coordinates(strips[0][0])
    first_key = t * BK + warp * 16
    column = divide((first_key + 1) * columns - 1, T, inverse_T)
    stop = divide((column + 1) * T, columns, inverse_columns) - first_key
    before, before_second = r < stop, r + 8 < stop
    low = add_quads(select_keys(strips[0], strips[1], before, before_second, DOWN), lane, DOWN)
    high = add_quads(select_keys(strips[0], strips[1], r >= stop, r + 8 >= stop, DOWN), lane, DOWN)
    side = r % 2
    cell = fold_lanes(low, high, side == 1, "4")
    cell += shuffle_lanes(cell, "8")
    cell += shuffle_lanes(cell, "16")
    if DOWN == 4:
        line = (lane % 2) * 2 + lane // 2
    else:
        line = lane % 2 if DOWN == 2 else lane * 0
    at = (t * (BK // 16) + warp) * 2 + side
    gl.store(cells_at + line * picture_columns + at, cell, mask=(r < 2) & (lane < DOWN))


@gluon.jit
def write_earlier_tile(
    t, sums, columns, cells_at, picture_columns, cut,
    RECEIVED: gl.constexpr, PICTURE: gl.constexpr, DOWN: gl.constexpr, WIDE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Add the sums of tile t to the received weights and to the picture. `cut` is for `write_cut_cells`."""
    strips, first, second = sums
    if RECEIVED:
        add_received(t, first, second, columns, cut[0], RAGGED)
    if PICTURE:
        if RAGGED:
            write_cut_cells(t, strips, cells_at, picture_columns, cut, DOWN)
        else:
            write_cells(t, strips, cells_at, picture_columns, DOWN, WIDE)
