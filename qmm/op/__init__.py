"""``qmm::matmul``, the matmul as an operator of torch: what torch.compile, torch.export, fake tensors, torch.func and
autograd see instead of the Python behind :func:`qmm.matmul`.

The weight enters as the plain tensors that are in memory (``parts``) and one line of text (``spec``, see
:mod:`qmm.op.spec`), so that a traced program takes the tensors as inputs and an update in place is seen. The backend
is chosen when the program is traced; its kernel and configuration when it runs, by the M of that run.
"""
