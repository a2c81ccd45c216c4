// A picture in pitched memory that is blurred through a texture in each step: texture [STEPS]
#include <vector>

#include "check.cuh"

__global__ void blur(cudaTextureObject_t in, float* out, int width) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    float sum = 0;
    for (int dy = -2; dy <= 2; dy++)
        for (int dx = -2; dx <= 2; dx++) sum += tex2D<float>(in, x + dx + 0.5f, y + dy + 0.5f);
    out[y * width + x] = sum / 25;
}

int main(int argc, char** words) {
    int steps = argc > 1 ? atoi(words[1]) : 300, width = 512, height = 512;
    size_t row = width * sizeof(float);
    std::vector<float> picture(width * height), result(width * height);
    for (int i = 0; i < width * height; i++) picture[i] = (i * 7 + i / width) % 256;
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    OK(cudaMallocArray(&array, &format, width, height));
    OK(cudaMemcpy2DToArray(array, 0, 0, picture.data(), row, row, height, cudaMemcpyHostToDevice));
    Clock clock;
    for (int step = 0; step < steps; step++) {
        float *pitched, *out;
        size_t pitch;
        OK(cudaMallocPitch(&pitched, &pitch, row, height));
        OK(cudaMemcpy2DFromArray(pitched, pitch, array, 0, 0, row, height, cudaMemcpyDeviceToDevice));
        OK(cudaMalloc(&out, row * height));
        cudaResourceDesc resource = {};
        resource.resType = cudaResourceTypePitch2D;
        resource.res.pitch2D.devPtr = pitched;
        resource.res.pitch2D.desc = format;
        resource.res.pitch2D.width = width;
        resource.res.pitch2D.height = height;
        resource.res.pitch2D.pitchInBytes = pitch;
        cudaTextureDesc access = {};
        access.addressMode[0] = access.addressMode[1] = cudaAddressModeClamp;
        cudaTextureObject_t texture;
        OK(cudaCreateTextureObject(&texture, &resource, &access, nullptr));
        blur<<<dim3(width / 16, height / 16), dim3(16, 16)>>>(texture, out, width);
        if (step == steps - 1) OK(cudaMemcpy(result.data(), out, row * height, cudaMemcpyDeviceToHost));
        OK(cudaDestroyTextureObject(texture));
        OK(cudaFree(out));
        OK(cudaFree(pitched));
    }
    OK(cudaDeviceSynchronize());
    double us = clock.seconds() / steps * 1e6, total = 0;
    for (float value : result) total += value;
    printf("%.1f us a step, total %.6e\n", us, total);
}
