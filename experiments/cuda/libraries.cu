// cuBLAS, cuFFT or cuSOLVER, with a handle made and destroyed in each round: libraries blas|fft|solver
#include <cublas_v2.h>
#include <cufft.h>
#include <cusolverDn.h>

#include <cstring>
#include <vector>

#include "check.cuh"

#define ZERO(call)                                              \
    do {                                                        \
        int code = (int)(call);                                 \
        if (code != 0) {                                        \
            printf("line %d: %d\n", __LINE__, code);            \
            exit(1);                                            \
        }                                                       \
    } while (0)

static const int N = 256;

static float blas(const float* matrix) {
    cublasHandle_t handle;
    float *product, one = 1, zero = 0, first;
    ZERO(cublasCreate(&handle));
    OK(cudaMalloc(&product, N * N * sizeof(float)));
    for (int i = 0; i < 20; i++)
        ZERO(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, N, N, N, &one, matrix, N, matrix, N, &zero, product, N));
    OK(cudaMemcpy(&first, product, sizeof first, cudaMemcpyDeviceToHost));
    ZERO(cublasDestroy(handle));
    OK(cudaFree(product));
    return first;
}

static float fft(float* matrix) {
    cufftHandle plan;
    float value;
    ZERO(cufftPlan2d(&plan, N, N / 2, CUFFT_C2C));
    for (int i = 0; i < 3; i++) ZERO(cufftExecC2C(plan, (cufftComplex*)matrix, (cufftComplex*)matrix, CUFFT_FORWARD));
    OK(cudaMemcpy(&value, matrix + 3, sizeof value, cudaMemcpyDeviceToHost));
    ZERO(cufftDestroy(plan));
    return value;
}

static float solver(float* matrix) {
    cusolverDnHandle_t handle;
    int size, *info;
    float *work, first;
    ZERO(cusolverDnCreate(&handle));
    ZERO(cusolverDnSpotrf_bufferSize(handle, CUBLAS_FILL_MODE_LOWER, N, matrix, N, &size));
    OK(cudaMalloc(&work, size * sizeof(float)));
    OK(cudaMalloc(&info, sizeof(int)));
    ZERO(cusolverDnSpotrf(handle, CUBLAS_FILL_MODE_LOWER, N, matrix, N, work, size, info));
    OK(cudaMemcpy(&first, matrix, sizeof first, cudaMemcpyDeviceToHost));
    OK(cudaFree(work));
    OK(cudaFree(info));
    ZERO(cusolverDnDestroy(handle));
    return first;
}

int main(int count, char** words) {
    const char* which = count > 1 ? words[1] : "blas";
    std::vector<float> values(N * N);
    // Symmetric and positive definite.
    for (int i = 0; i < N * N; i++) values[i] = ((i / N + i % N) % 17) * 0.01f + (i % (N + 1) == 0 ? N : 0);
    double sum = 0;
    for (int round = 0; round < 5; round++) {
        float* matrix;
        OK(cudaMalloc(&matrix, N * N * sizeof(float)));
        OK(cudaMemcpy(matrix, values.data(), N * N * sizeof(float), cudaMemcpyHostToDevice));
        sum += !strcmp(which, "blas") ? blas(matrix) : !strcmp(which, "fft") ? fft(matrix) : solver(matrix);
        OK(cudaFree(matrix));
    }
    printf("%s %.9e\n", which, sum);
}
