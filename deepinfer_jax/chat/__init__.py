"""Messages to prompt ids and completion ids to messages, through deepseek-recipe."""
