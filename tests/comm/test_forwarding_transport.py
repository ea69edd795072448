"""A transport around another one answers as that one, whatever ``Transport`` names."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest

from zeroengine.comm.forwarding_transport import ForwardingTransport
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.transport_traits import TransportTraits

METHODS = {
    name: value
    for part in (TransportTraits, Transport)
    for name, value in vars(part).items()
    if inspect.isfunction(value) and not name.startswith("_")
}
PROPERTIES = {name for name, value in vars(Transport).items() if isinstance(value, property)}
ATTRIBUTES = PROPERTIES | set(Transport.__annotations__) | set(TransportTraits.__annotations__)


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_an_attribute_is_that_of_the_transport_within(name: str) -> None:
    inner = mock.Mock()
    assert getattr(ForwardingTransport(inner), name) is getattr(inner, name)


def test_a_wrapper_stays_around_a_transport_that_opens_groups() -> None:
    inner = mock.Mock()
    inner.open_groups.return_value = inner
    wrapper = ForwardingTransport(inner)
    assert wrapper.open_groups((), mock.Mock()) is wrapper
    inner.open_groups.assert_called_once()


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"open_groups"}))
def test_a_method_passes_its_arguments_to_the_transport_within(name: str) -> None:
    inner = mock.Mock()
    signature = inspect.signature(METHODS[name])
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    positional = [object() for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = {parameter.name: object() for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    returned = getattr(ForwardingTransport(inner), name)(*positional, **keywords)
    getattr(inner, name).assert_called_once_with(*positional, **keywords)
    assert returned is getattr(inner, name).return_value or signature.return_annotation == "None"
