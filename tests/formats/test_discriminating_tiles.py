"""16x16 tiles whose choice between 4 and 6 hangs on the order in which the 16 row errors are added.

Found by search: row errors of random rows, combined so that the two sums differ by about one unit in the last
place. TransformerEngine adds row i + 8 to row i, then + 4, + 2, + 1; rows added one after the other, and
neighbours added first, take the other scale.
"""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
from bitwise import BF16, F32, Array, assert_same_bits, bf16
from nvfp4_oracle import fl

from lowprec.formats import get_format

NVFP4 = get_format("nvfp4")

# G, e4m3_max, error, scale of map-to-4, of map-to-6, which is taken, the rows in bfloat16 bits
TILES = [
    (
        4.375, 448, "mse", 0x78, 0x73, 4,
        (
            "3fdc 3ea5 bf48 bef9 3d11 3e9c 3f21 bf08 3f62 3f99 bef4 bdc7 bde2 bef4 3eb8 bf7a "
            "bd20 bea8 3e73 3ec0 3f38 3eb1 be70 becd 3f28 3da9 bbf4 3e64 bf79 3e69 bf3d bec3 "
            "bf1a bf88 3d6f bcfb 3e1d 3d84 bf11 3e9c 3e51 3ed9 3f31 befd be8c bd8f 3e49 be48 "
            "3ece 3e2e bf30 bef7 bd97 3d97 3d84 bf37 3d7b bd79 be51 3d6d be4f 3f9c 3fa7 be8b "
            "bef5 be4c 3eac 3e6a 3f05 3da5 3f40 bed5 3eaa 3e9f 3ed6 bea5 3e84 3d3b 3e1b be0a "
            "3eb8 be63 3b09 3c02 bf38 bd89 3e98 bec6 bf20 bf15 bf49 3e33 3f68 bedb bf38 3eb1 "
            "bf04 3fac bef4 3f48 bcf7 3ea3 3f29 3efb 3f40 beb2 bec3 bea3 3d84 3f04 bf40 be99 "
            "be17 beb8 3e90 be8f bee0 bd81 3e3a 3f51 be3b 3e3a be8b 3e5b bea7 bb47 3f03 bf36 "
            "3d0d be94 3e1b 3d65 bef3 bd72 bf68 bf03 be37 3ca1 bec4 bec6 bec4 3db9 bf1f 3f8a "
            "3f3e bf41 bf17 bf83 bf6c bf09 bd79 3fbd bf01 3f6d 3e24 bf59 bde2 bec0 3e67 be17 "
            "3e2e 3f51 be9d be7d bea5 3d27 3efb be5e 3cc4 bec2 3f36 bf70 3e6b bf23 be85 3d3d "
            "be32 3b63 bd58 bd93 3f76 be50 3e8d be33 be2c bf3a bef1 3f1f bf1b bce5 3da4 3ee7 "
            "3efe 3eed 3e5e beb8 3fc5 bebc 3f20 3edd 3f50 3eca bf30 beb4 be27 3ec8 3f6a be57 "
            "be89 3f71 bef4 bf0b 3eff bf38 3e4e 3f57 be44 bec0 bec2 bd8f bf24 beeb be19 3cf7 "
            "3e99 3d95 3f41 bf0c bfa8 3e61 bf45 3f66 3d86 3eae beb1 3e49 bf3e bd23 bf5a 3ed1 "
            "bd83 beca 3e4e 3ef3 bf1e bf35 be29 3e85 3f48 bf21 bf42 3c10 becc 3f4d 3f27 be1b "
        ),
    ),
    (
        4.375, 256, "mse", 0x71, 0x6D, 6,
        (
            "3fdc beb5 3d88 bd2b 3d16 3ebe bf33 3ee7 3f21 be72 be2b bf07 bf3f 3f55 3e94 bf11 "
            "bf80 bf5c bdc9 3ed7 3f22 3d9e 3ea5 3f0e be69 3f34 be89 3f55 3eb2 bea1 bf58 3ef6 "
            "3ec6 3f50 bf41 bf4b be3a 3dd2 3ddf 3ee0 bf0f bf2c bdd4 3ec2 bf19 3f68 bf8f 3f25 "
            "bfb8 be82 bf03 3f6f be28 bdd5 3f49 beb9 becf 3e99 3f3e bede 3ee5 3e67 beab bd9b "
            "3d2d bf73 3c7d 3f1e bdb0 be1e 3ec8 be6f 3ed8 3e3f 3ef4 bf5d 3efa 3eb6 3e66 bec3 "
            "be86 be8a 3fc7 3f23 3e89 bef6 3e31 3f5e 3f4a 3ecf bf0f 3f03 beb4 bf7f bef0 3ef7 "
            "3f24 3ea2 bf08 be7c 3ef0 be09 bf68 be50 be68 bedf be5e 3ed0 bf8b 3e5f bdf2 bf27 "
            "bdc7 beb0 be29 3cf4 be43 bbbd bd81 bf30 3f4e be76 3e03 bed2 bd20 3e82 3f0b 3ddb "
            "3f0f 3e0f be34 3e3a bf24 bf5c 3f9c be31 bd54 3eaa 3f52 bd2d 3e06 bea2 3f23 bc2f "
            "be29 bf8b 3eb2 beb2 3f23 3dd6 bd93 bed7 3d93 3f60 3f03 3e77 be28 bda6 be6e bd6a "
            "be10 bf11 bd6b 3f63 bef8 bf1a 3ece 3f17 3f2e 3ecf 3e8c 3f17 bfbc 3e4d 3ef7 3dd4 "
            "bf4d bee2 3e8d 3ed7 bd05 bda7 bf4e 3eb0 bebf be59 3e3b be72 be18 bfc4 bde4 bf9c "
            "3c91 bf4c 3f2d 3e63 bede bf17 3e67 beae 3d5e bed1 bf38 bf28 3d83 beb3 3e39 bdc5 "
            "3e57 bf6c bf90 bd91 bebc 3e5e bf15 3f39 bdb2 3f06 bf33 bf18 3e51 be8a bf44 3e12 "
            "bf36 3e09 3f21 3f1d be2f bde7 bf96 3df9 bf12 3f2a beb3 bd52 bf19 be3d 3d9b 3dfc "
            "bf00 3db5 3eae 3db5 bf13 be42 3eed bf40 bec2 bf88 3d83 3eca 3e66 bf44 3eba 3fa6 "
        ),
    ),
]  # fmt: skip


def in_order(error: Array) -> float:
    total = 0.0
    for value in error:
        total = float(fl(total + value))
    return total


def neighbours(error: Array) -> float:
    while len(error) > 1:
        error = fl(error[0::2] + error[1::2])
    return float(error[0])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(("g", "largest", "error", "four", "six", "pick", "words"), TILES)
def test_row_errors_are_added_as_a_tree(g, largest, error, four, six, pick, words, dtype) -> None:
    tile = bf16(words).astype(np.float64).reshape(16, 16)
    amax, outer = np.full(16, np.abs(tile).max()), np.full(16, g)
    by_four, by_six = oracle.candidates(tile, outer, float(largest), amax)
    assert (by_four.scale[0], by_six.scale[0]) == (four, six)
    e4, e6 = (oracle.errors(tile, outer, float(largest), result, error) for result in (by_four, by_six))
    assert (in_order(e4) < in_order(e6)) == (neighbours(e4) < neighbours(e6)) == (pick == 6)

    x = np.zeros((16, 32), dtype)
    x[:, :16] = tile
    x[3, 16] = g
    options = NVFP4.options.parse({"four_over_six": error, "e4m3_max": largest, "block": (16, 16)})
    q = NVFP4.quantize(x, options, None)
    want = by_four if pick == 4 else by_six
    assert_same_bits(q.scale.view(np.uint8)[:, 0], want.scale, None, "scale")
    assert_same_bits(NVFP4.codes(q.qdata)[:, :16], want.codes, tile, "codes")
