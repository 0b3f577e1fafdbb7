"""Admission, where no request over HTTP can show it."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from mrrope.serving.scale_choice import ScaleSteps
from mrrope.sglang.request_scale import Admission


def test_beams_that_no_request_names_are_refused():
    """``--preferred-sampling-params`` of the server are in the tokenized request only."""
    admission = Admission(ScaleSteps((64, 128), (1.0, 2.0), reserve=8), 128, "tiny", is_auto=True)
    tokenized = SimpleNamespace(sampling_params=SamplingParams(beam_width=2))
    with pytest.raises(ValueError, match="beam_width must be 1 with rope_parameters' factor 'auto', got 2"):
        admission.admit(tokenized, GenerateReqInput(input_ids=[1, 2, 3], sampling_params={}))
