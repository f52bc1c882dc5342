"""Asynchronous RL of a language model's adapters; the code is in ``torchrl_llm_async.recipes``.

Nothing is imported at module level: a process that the recipe spawns imports this file again.
"""

if __name__ == "__main__":
    import sys

    from torchrl_llm_async.recipes.async_rl_lora_finetune_distributed import recipe_main

    sys.exit(recipe_main())
