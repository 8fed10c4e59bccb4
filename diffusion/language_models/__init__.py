"""Client of language models behind OpenAI's API, and the rules that reject their answers."""
