from ._fakes import call, tensor, problems
def test_x():
    n = call("matmul", tensor(2,3), tensor(3,4))
    assert n.outputs["C"].dim == (2,4)
    assert problems(n) == []
