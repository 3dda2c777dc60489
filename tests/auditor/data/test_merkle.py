"""The tree against its plain definition, and that neither order, grouping nor level can be taken for another."""

import hashlib

import pytest

from auditor.data.merkle import Leaf, root


def plain_root(leaves):
    """RFC 6962's tree, by its recursive definition."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + plain_root(leaves[:k]) + plain_root(leaves[k:])).digest()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 13, 64, 77])
def test_the_root_is_that_of_the_recursive_definition(n):
    leaves = [hashlib.sha256(f"leaf {k}".encode()).digest() for k in range(n)]
    assert root([leaf.hex() for leaf in leaves]) == plain_root(leaves).hex()


def test_the_order_of_leaves_counts_and_a_node_is_no_leaf():
    a, b, c = (hashlib.sha256(text).hexdigest() for text in (b"a", b"b", b"c"))
    assert len({root(leaves) for leaves in ([a, b, c], [a, c, b], [c, b, a], [a, b], [root([a, b]), c])}) == 4
    assert root([root([a, b]), c]) == root([a, b, c])  # the tree itself: (a b) c
    assert root([a, root([b, c])]) != root([a, b, c])
    leaf = Leaf()
    leaf.add("", "", bytes.fromhex(a))
    assert leaf.hexdigest() != root([a])


def test_names_labels_and_contents_of_a_leaf_cannot_run_into_each_other():
    def of(*rows):
        leaf = Leaf()
        for row in rows:
            leaf.add(*row)
        return leaf.hexdigest()

    same = [
        of(("ab", "c", b"x")),
        of(("a", "bc", b"x")),
        of(("ab", "cx", b"")),
        of(("ab", "c", b"x"), ("", "", b"")),
        of(("ab", "c", b"y")),
    ]
    assert len(set(same)) == len(same)
