"""transformers' own processor class, without torchvision."""

from transformers import AutoTokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class NoVideos:
    """In place of the video processor, which needs torchvision."""

    merge_size = 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")


class ImagesOnly(Qwen2VLProcessor):
    """transformers' class; only the check of the video processor's class is left out."""

    def check_argument_for_proper_class(self, argument_name, argument):
        if argument_name == "video_processor":
            return NoVideos
        return super().check_argument_for_proper_class(argument_name, argument)


def real_processor(folder, **settings) -> Qwen2VLProcessor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder, **settings)
    return ImagesOnly(images, tokenizer, NoVideos(), chat_template=tokenizer.chat_template)
