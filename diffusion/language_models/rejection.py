"""Named rules that reject answers of a vision-language model, such as refusals, loops and echoes of the prompt."""

import re
import unicodedata

from diffusion.config.prompt_files import Prompt

REFUSAL = re.compile(
    r"^\W*(i('m| am) (sorry|unable|not able)|"
    r"i (cannot|can't|can not|won't|do not|don't) (see|view|describe|help|assist|provide|identify|process|comply)|"
    r'sorry,|as an ai\b|unfortunately, i\b|there is no image|no image (was|is) provided)',
    re.IGNORECASE,
)
CUT_OFF = 'cut_off'
"""Rule for an answer that reached `max_tokens`; it usually ends within a sentence."""
LOOP_REPEATS = {1: 5, 2: 4}
"""A phrase of 1 or 2 words is a loop if it is repeated this many times after its first occurrence; 3 to 20 words: 2."""
LONGEST_REPEAT_WORDS = 20
ECHO_WORDS = 12
"""An answer with this many consecutive words of the prompt is an echo."""
MAX_FOREIGN_LETTERS = 0.25
_QUOTED = re.compile(r'"[^"]*"|“[^”]*”|«[^»]*»|「[^」]*」')


def rejection(answer: str, prompt: Prompt, *, cut_off: bool) -> str | None:
    """Return the name of the first rule that rejects an answer, or None if it is a usable caption.

    Args:
        cut_off: True if the answer ended because it reached the maximum number of tokens.
    """
    if prompt.answer is not None:
        return 'not_as_asked' if prompt.parsed(answer) is None else None
    words = answer.split()
    if not words:
        return 'empty'
    if REFUSAL.search(answer):
        return 'refusal'
    if is_loop(words):  # before cut_off: a loop usually continues up to the maximum number of tokens
        return 'loop'
    if cut_off:
        return CUT_OFF
    if is_echo(words, prompt.text.split()):
        return 'echo'
    if prompt.script == 'latin' and foreign_letters(answer) > MAX_FOREIGN_LETTERS:
        return 'other_language'
    if len(words) < prompt.min_words:
        return 'too_short'
    if prompt.max_words is not None and len(words) > prompt.max_words:
        return 'too_long'
    return next((name for name, pattern in prompt.reject.items() if re.search(pattern, answer)), None)


def is_loop(words: list[str]) -> bool:
    """Return True if a phrase of 1 to 20 words is repeated directly after itself at least `LOOP_REPEATS` times."""
    for length in range(1, min(LONGEST_REPEAT_WORDS, len(words) // 2) + 1):
        run, needed = 0, length * LOOP_REPEATS.get(length, 2)
        for at in range(length, len(words)):
            run = run + 1 if words[at] == words[at - length] else 0
            if run >= needed:
                return True
    return False


def is_echo(words: list[str], prompt: list[str]) -> bool:
    """Return True if the prompt has `ECHO_WORDS` consecutive words of the answer, or all 6 to 11 of a shorter one."""
    length = min(ECHO_WORDS, max(len(words), ECHO_WORDS // 2))
    phrases = {tuple(prompt[at : at + length]) for at in range(len(prompt) - length + 1)}
    return any(tuple(words[at : at + length]) in phrases for at in range(len(words) - length + 1))


def foreign_letters(text: str) -> float:
    """Return the fraction of letters that are not Latin, without quotations, in [0, 1]; 0 if there are no letters."""
    letters = [letter for letter in _QUOTED.sub('', text) if letter.isalpha()]
    foreign = sum(not unicodedata.name(letter, '').startswith('LATIN') for letter in letters)
    return foreign / max(1, len(letters))
