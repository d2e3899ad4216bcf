"""Endpoints over an engine in another process answer as over one in their own: the same tests, with a socket in between."""

from collections.abc import Callable

import pytest

from tests.api import test_beams, test_chat, test_completions, test_messages
from tests.api.answers import test_streaming
from tests.api.remote import loopback
from tests.api.responses import test_responses
from tests.api.semantics import test_call_limits, test_tool_calls

SAME: tuple[Callable[[], None], ...] = (
    test_chat.test_reasoning_and_content_come_apart,
    test_chat.test_a_call_finishes_with_tool_calls_unless_it_was_cut,
    test_chat.test_n_answers_are_told_apart_by_index,
    test_chat.test_stop_strings_end_the_content_and_are_reported,
    test_chat.test_logprobs_name_tokens_and_never_hold_minus_infinity,
    test_chat.test_fields_reach_the_engine,
    test_chat.test_what_does_not_fit_the_context_is_refused_with_the_numbers,
    test_completions.test_all_four_forms_of_prompts_are_numbered_through,
    test_completions.test_a_prompt_can_be_scored_without_generating,
    test_completions.test_bad_requests_are_refused_with_the_path,
    test_messages.test_usage_is_the_prompt_in_three_parts,
    test_messages.test_any_transcript_cut_anywhere_is_the_same_streamed_and_whole,
    test_beams.test_a_conversation_is_answered_by_searching_too,
    test_beams.test_several_prompts_are_searched_beside_each_other,
    test_call_limits.test_under_auto_markup_that_a_grammar_forced_is_no_content_and_text_before_it_is,
    test_responses.test_reasoning_text_and_calls_are_items_with_ids_of_their_own,
    test_responses.test_a_failure_in_mid_stream_is_an_error_and_a_failed_response_that_is_stored,
    test_tool_calls.test_a_call_that_is_cut_has_length,
    test_streaming.test_comments_keep_an_idle_stream_alive_and_errors_after_them_are_events,
    test_streaming.test_a_client_that_leaves_in_mid_stream_aborts_its_request,
    test_tool_calls.test_numbers_of_tools_and_of_arguments_of_the_template_may_have_any_size,
    test_tool_calls.test_strict_arguments_are_exact_or_refused_and_others_as_exact_as_can_be,
)


@pytest.mark.parametrize("test", SAME, ids=lambda test: test.__name__)
def test_the_answers_are_the_same(test: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "IS_REMOTE", True)
    test()
