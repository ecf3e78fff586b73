"""The laws that every method must keep, for anyone's method.

    from coterie.testing import check_method

    def test_my_method():
        check_method(MyMethod)

It needs no pytest: in a notebook ``print(check_method(MyMethod))`` says what was checked.
"""

from .checker import LAWS, BrokenLawsError, MethodReport, check_method

__all__ = ["LAWS", "BrokenLawsError", "MethodReport", "check_method"]
