# A server for looped models on one GPU or more, checkpoints kept in ./models:
#   docker build -t residualquant-serve .
#   docker run --gpus all -p 8000:8000 -e HF_HOME=/models -v "$PWD/models:/models" \
#     residualquant-serve ByteDance/Ouro-1.4B
# Several GPUs share memory: add --ipc=host, and -- --tensor-parallel-size N at the end.
FROM vllm/vllm-openai:v0.25.1
WORKDIR /opt/residualquant
COPY pyproject.toml README.md LICENSE ./
COPY residualquant residualquant
COPY kernels kernels
COPY data data
COPY notebooks notebooks
# vLLM's image brings torch, transformers and safetensors in the versions vLLM was built for: nothing of it may change.
RUN python3 -m pip install --no-cache-dir --no-deps \
        tyro==1.0.17 typeguard==4.6.1 docstring_parser==0.18.0 tabulate==0.10.0 \
    && python3 -m pip install --no-cache-dir --no-deps .
EXPOSE 8000
ENTRYPOINT ["residualquant", "serve"]
