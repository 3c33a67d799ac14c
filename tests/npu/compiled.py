"""Functions through torch.compile, whole, and through torch.export."""

import torch

COMPILERS = ("eager", "aot_eager")


def compiled(function, compiler):
    """The function through torch.compile; an error where any of it cannot be traced."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=compiler)


def exported(function, arguments):
    """The function as torch.export's graph, traced with fake tensors."""

    class Module(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    return torch.export.export(Module(), arguments, strict=False).module()
