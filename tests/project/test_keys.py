"""Keys are frozen for ever: the vectors come from `printf 'namespace\\0name' | sha256sum`, not from this library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgleaderlock import ConfigurationError, LeaderLock, key_pair, key_pair_from_bigint
from pgleaderlock.keys import check_key_pair

VECTORS = [
    ("billing", "pgleaderlock", (-691079183, -1047996955)),  # d6cef7f1 c188d5e5
    ("a", "pgleaderlock", (1801442448, 1228449248)),  # 6b5fd490 4938a5e0
    ("größe", "pgleaderlock", (-1819636529, -1255474685)),  # 938a8ccf b52afa03
    ("日本", "pgleaderlock", (-923453839, -2019247474)),  # c8f53671 87a4ba8e
    ("billing", "other", (859658790, -721857252)),  # 333d5a26 d4f9551c
    ("b", "a", (1504866734, 465351123)),  # 59b271ae 1bbcb1d3
]


@pytest.mark.parametrize(("name", "namespace", "keys"), VECTORS)
def test_a_name_gives_the_same_keys_for_ever(name: str, namespace: str, keys: tuple[int, int]) -> None:
    assert key_pair(name, namespace) == keys


def test_the_default_namespace_is_pgleaderlock() -> None:
    assert key_pair("billing") == (-691079183, -1047996955)


def test_a_named_lock_takes_the_keys_of_its_name() -> None:
    assert LeaderLock.for_name("host=h", "billing")._settings.keys == (-691079183, -1047996955)
    assert LeaderLock.for_name("host=h", "billing", namespace="other")._settings.keys == (859658790, -721857252)


def test_namespace_and_name_are_kept_apart() -> None:
    assert key_pair("bc", "a") != key_pair("c", "ab")
    assert key_pair("billing", "other") != key_pair("billing")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=100))
def test_keys_fit_what_postgresql_takes(name: str) -> None:
    assert check_key_pair(*key_pair(name)) == key_pair(name)


@pytest.mark.parametrize(
    ("key", "halves"),
    [
        (0, (0, 0)),
        (1, (0, 1)),
        (-1, (-1, -1)),
        (0x0000_0001_0000_0002, (1, 2)),
        (0x0000_0000_8000_0000, (0, -(2**31))),
        (0x7FFF_FFFF_FFFF_FFFF, (2**31 - 1, -1)),
        (-0x8000_0000_0000_0000, (-(2**31), 0)),
    ],
)
def test_a_bigint_becomes_its_high_and_its_low_half(key: int, halves: tuple[int, int]) -> None:
    assert key_pair_from_bigint(key) == halves


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_bigint_can_be_put_together_again(key: int) -> None:
    high, low = key_pair_from_bigint(key)
    assert check_key_pair(high, low) == (high, low)
    assert (high << 32) + (low & 0xFFFFFFFF) == key


@pytest.mark.parametrize("key", [2**63, -(2**63) - 1])
def test_a_bigint_out_of_range_is_refused_with_the_range(key: int) -> None:
    with pytest.raises(ConfigurationError, match=r"-9223372036854775808 to 9223372036854775807"):
        key_pair_from_bigint(key)


@pytest.mark.parametrize("keys", [(2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1), (0, 0)])
def test_the_whole_range_of_32_bits_is_usable(keys: tuple[int, int]) -> None:
    assert check_key_pair(*keys) == keys
    assert LeaderLock("host=h", *keys)._settings.keys == keys


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**40])
@pytest.mark.parametrize("which", ["key1", "key2"])
def test_a_key_out_of_range_is_refused_with_its_name_and_the_range(which: str, wrong: int) -> None:
    keys = (wrong, 1) if which == "key1" else (1, wrong)
    with pytest.raises(ConfigurationError, match=rf"{which}={wrong} .*-2147483648 to 2147483647"):
        LeaderLock("host=h", *keys)


@pytest.mark.parametrize("wrong", [True, False, 1.0, "1", None, b"1"])
@pytest.mark.parametrize("which", ["key1", "key2"])
def test_a_key_that_is_no_integer_is_refused(which: str, wrong: int) -> None:
    keys = (wrong, 1) if which == "key1" else (1, wrong)
    with pytest.raises(ConfigurationError, match=rf"{which} must be an integer .*not {type(wrong).__name__}"):
        LeaderLock("host=h", *keys)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None])
def test_a_bigint_that_is_no_integer_is_refused(wrong: int) -> None:
    with pytest.raises(ConfigurationError, match="must be an integer"):
        key_pair_from_bigint(wrong)


BAD_TEXT = [
    ("", "must not be empty"),
    ("a\0b", "NUL"),
    ("\ud800", "surrogate"),
    ("x" * 513, "513 bytes"),
    ("ü" * 257, "514 bytes"),
    (None, "must be a string, not NoneType"),
    (b"billing", "must be a string, not bytes"),
    (1, "must be a string, not int"),
]


@pytest.mark.parametrize(("text", "why"), BAD_TEXT, ids=[why for _, why in BAD_TEXT])
def test_a_name_that_cannot_be_a_name_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^name.*{why}"):
        key_pair(text)
    with pytest.raises(ConfigurationError, match=f"^namespace.*{why}"):
        key_pair("billing", text)
    with pytest.raises(ConfigurationError, match=f"^name.*{why}"):
        LeaderLock.for_name("host=h", text)


def test_the_longest_name_is_taken() -> None:
    assert key_pair("x" * 512) != key_pair("x" * 511)
    assert key_pair("ü" * 256) != key_pair("ü" * 255)
