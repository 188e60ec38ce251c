# Included after llama.cpp's project(): its package turns the helpers of its command-line tools on, a fifth of the build.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
